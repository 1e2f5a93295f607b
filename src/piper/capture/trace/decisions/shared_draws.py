"""Which random numbers belong to which rows of a batch, and which to all of them.

Plain training on a whole batch draws numbers whose size does not depend on the batch once. So all
microbatches must have the same ones. Others are counted by rows, wherever a tensor has these. Sizes
alone say neither: a tensor of [tokens] may have as many elements as the batch has rows. So the
model is traced with another number of rows.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from piper.capture.fx_nodes import arguments, line, paired
from piper.capture.torch_private import argument_names, fake_errors_unlogged
from piper.capture.trace.decisions.row_loops import rows_in_loops
from piper.capture.trace.decisions.row_order import RowOrder, grown, rows_first, sizes

aten = torch.ops.aten
ONCE = "piper_once"  # in the meta of random nodes: the same numbers for all rows of a step
ROWS = "piper_rows"  # there, too: the dimension of the rows, and in how many groups of all rows
ROW = "piper_row"  # there, too: the row for which a loop draws, of how many, and a name of the loop
# Traces with a multiple of so many times the rows. Returns how many times as many it took.
Retrace = Callable[[int], tuple[fx.GraphModule, int]]


def mark_draws(
    root: fx.GraphModule, batch: Collection[fx.Node], rows: int, other_rows: Retrace
) -> list[str]:
    """Mark the draws that all rows share, and where others have rows.

    `other_rows` traces with other numbers of rows. Returns the lines of draws that are neither.
    """
    drawn, first = draws(root.graph), rows_first(root.graph, batch, rows)
    if first.issuperset(drawn):
        return []
    try:
        with fake_errors_unlogged():
            return Marks(root.graph, batch, first, rows, other_rows).made(drawn)
    except Exception:  # the model takes only one number of rows
        mark_once(node for node in drawn if not sizes(node))
        return []


class Marks:
    """Compares the draws of a trace with those of others."""

    def __init__(
        self,
        graph: fx.Graph,
        batch: Collection[fx.Node],
        first: Collection[fx.Node],  # values that have rows first
        rows: int,
        other_rows: Retrace,
    ) -> None:
        self.graph, self.first = graph, first
        other, self.times = other_rows(3)
        self.rows, more = rows, rows * self.times
        places = dict(zip(_inputs(graph), _inputs(other.graph), strict=True))
        given = [places[node] for node in batch]
        self.others = draws(other.graph)
        twins = paired(graph, other.graph)
        self.is_paired = twins is not None
        if twins is not None:
            self.order = RowOrder(twins, batch, rows, self.times)
        else:  # one row may be contiguous where several have to be copied
            last, times = other_rows(2 * self.times)
            twins = paired(other.graph, last.graph) or {}
            self.order = RowOrder(twins, given, more, times // self.times)

    def made(self, drawn: Sequence[fx.Node]) -> list[str]:
        """The lines of draws of which nothing is known."""
        others, unclear = by_line(self.others), []
        for place, nodes in by_line(drawn).items():
            known = self._mark_line(nodes, others.get(place, []))
            unclear += (
                []
                if known or all(node in self.first for node in nodes)
                else [place[0] or "the model"]
            )
        return unclear

    def _mark_line(self, nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
        """Whether all draws of one line are known. Those of a loop have the same sizes."""
        if len(nodes) != len(others):
            here, there = by_sizes(nodes), by_sizes(others)
            loops = [one for one in here if self._is_loop(here[one], there.get(one, []))]
            known = [self._mark_loop(here[one]) for one in loops]
            if not all(known):
                return False
            nodes = [node for node in nodes if str(sizes(node)) not in loops]
            others = [node for node in others if str(sizes(node)) not in loops]
        if len(nodes) != len(others):
            return False
        known = [self._mark(*pair) for pair in zip(nodes, others, strict=True)]
        return all(known)

    def _by_sizes(self, node: fx.Node, other: fx.Node) -> tuple[int, int] | None:
        """Beside a loop over rows, draws are compared one by one."""
        dim = grown(sizes(node), sizes(other), self.times)
        return None if dim is None or int(sizes(node)[dim]) > self.rows else (dim, 1)

    def _is_loop(self, nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
        """Whether as many numbers are drawn for each row."""
        return len(nodes) % self.rows == 0 and len(others) == len(nodes) * self.times

    def _mark_loop(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether it is known which draw is for which row."""
        rows = rows_in_loops(self.graph, self.first, self.rows)
        each = [[node for node in nodes if rows.get(node) == row] for row in range(self.rows)]
        if len(nodes) == self.rows and not any(each):  # nothing else is known: in turn
            each = [[node] for node in nodes]
        if any(len(own) * self.rows != len(nodes) for own in each):
            return False
        for alike in zip(*each, strict=True):
            mark_loop(alike)
        return True

    def _mark(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether it is known where it has rows, or that it has none."""
        if sizes(node) == sizes(other) and all(size.isdigit() for size in sizes(node)):
            mark_once([node])
            return True
        if node.target is aten.randperm.default:  # rows meet, which has a warning of its own
            return True
        found = self.order.of(node if self.is_paired else other) or self._by_sizes(node, other)
        if found is not None and found != (0, 1):
            node.meta[ROWS] = found
        return found is not None


def mark_loop(nodes: Sequence[fx.Node]) -> None:
    for k, node in enumerate(nodes):
        node.meta[ROW] = k, len(nodes), nodes[0].name


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def mark_once(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        node.meta[ONCE] = True


def by_line(nodes: Iterable[fx.Node]) -> dict[tuple[str, str], list[fx.Node]]:
    """Draws of the same kind on the same line of the model, in order."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for node in nodes:
        found.setdefault((line(node), str(node.target)), []).append(node)
    return found


def by_sizes(nodes: Iterable[fx.Node]) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(str(sizes(node)), []).append(node)
    return found


def draws(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_random(node) and not _is_known(node)]


def _is_known(node: fx.Node) -> bool:
    """Whether it is marked, or drops nothing."""
    if node.meta.get(ONCE) or node.target is not aten.dropout.default:
        return bool(node.meta.get(ONCE))
    given = arguments(node)
    return not given["train"] or not given["p"]


def is_random(node: fx.Node) -> bool:
    """Attention and recurrent layers are tagged because of their dropout, which may be 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = argument_names(node)
    probability = next((name for name in ("dropout_p", "dropout") if name in names), None)
    if probability is None:
        return True
    given = [*node.args, *(None for _ in names)][names.index(probability)]
    return (given or node.kwargs.get(probability) or 0.0) != 0.0
