"""Two traces of one model that answer a random decision differently, node by node."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from piper.capture.fx_nodes import value
from piper.capture.python_state.graph_equality import Numbering, Numbers


@dataclass(frozen=True)
class Way:
    """A trace, and its answer to each decision. Its last results are the marks of decisions."""

    root: fx.GraphModule
    answers: tuple[bool, ...]
    numbering: Numbering  # one for all ways of a model

    @cached_property
    def numbers(self) -> Numbers:
        """The same for nodes that compute the same, as they were traced."""
        return self.numbering.of(self.root)

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.root.graph.nodes)

    @cached_property
    def reads(self) -> dict[fx.Node, list[fx.Node]]:
        """What each node reads, as it was traced."""
        return {node: list(reads_of(node)) for node in self.nodes}

    @property
    def results(self) -> list[fx.Node]:
        return list(self.root.graph.output_node().args[0])

    @cached_property
    def marks(self) -> list[fx.Node]:
        return self.results[len(self.results) - len(self.answers) :]


def reads_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes among the arguments, in order and with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    yield from found


def rewrite(node: fx.Node, reads: list[fx.Node]) -> None:
    """Let a node read these, in the order of `reads_of`."""
    given = iter(reads)
    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(given))


def shape_of(node: fx.Node) -> Any:
    """As text, because comparing unknown sizes is an error."""
    found = value(node)
    return (str(tuple(found.shape)), found.dtype) if isinstance(found, Tensor) else str(found)


def same_start(one: Way, other: Way, end: int) -> bool:
    """Whether both compute the same up to the node with this index."""
    pairs = zip(one.nodes[: end + 1], other.nodes[: end + 1], strict=False)
    return all(one.numbers[a] == other.numbers[b] for a, b in pairs)


def same_end(one: Way, other: Way, start: int) -> int:
    """How many nodes at the end of both are alike, and read the same or what comes before."""
    most = min(len(one.nodes), len(other.nodes)) - start
    count = 0
    while count < most and _are_alike(one, other, count):
        count += 1
    while (less := _closed(one, other, count)) < count:
        count = less
    return count


def _closed(one: Way, other: Way, count: int) -> int:
    """Of so many nodes at the end, how many read only their like, or what comes before all."""
    ours, theirs = (way.nodes[len(way.nodes) - count :] for way in (one, other))
    index = {node: k for nodes in (ours, theirs) for k, node in enumerate(nodes)}
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(one.reads[a], other.reads[b], strict=True):
            if index.get(x) != index.get(y):
                return count - 1 - min(index[node] for node in (x, y) if node in index)
    return count


def _are_alike(one: Way, other: Way, behind: int) -> bool:
    """Whether two nodes with so many behind them do the same, whatever they read."""
    a, b = one.nodes[-1 - behind], other.nodes[-1 - behind]
    if a.op == "get_attr" or b.op == "get_attr":
        return one.numbers[a] == other.numbers[b]
    return (a.op, a.target, _form(a), shape_of(a)) == (b.op, b.target, _form(b), shape_of(b))


def _form(node: fx.Node) -> str:
    """The arguments of a node, whatever the nodes among them."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: ...))
