"""Random numbers that all rows of a step share: those whose size does not depend on the batch.

Plain training on a whole batch draws such numbers once. So all microbatches must have the same
ones. Sizes alone do not say which these are: a tensor of [tokens] may have as many elements as the
batch has rows. So the model is traced with another number of rows.
"""

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import line, value
from piper.capture.torch_private import fake_errors_unlogged, pytree

ONCE = "piper_once"  # in the meta of random nodes: the same numbers for all rows of a step
LIKE = ("_like", "new_empty", "new_full", "new_ones", "new_zeros")  # names end so: only sizes count


def mark_shared(
    root: fx.GraphModule,
    batch: Collection[fx.Node],
    rows: int,
    other_rows: Callable[[], fx.GraphModule],
) -> None:
    """Mark the draws that all rows share. `other_rows` traces with another number of rows."""
    drawn = draws(root.graph)
    follow = depending(root.graph, batch)
    if not any(may_be_shared(node, follow, rows) for node in drawn):
        return
    try:
        with fake_errors_unlogged():
            others = by_line(draws(other_rows().graph))
    except Exception:  # the model takes only one number of rows
        mark(node for node in drawn if not sizes(node))
        return
    for place, nodes in by_line(drawn).items():
        alike = others.get(place, [])
        if len(nodes) == len(alike):  # else it is a loop over rows
            pairs = zip(nodes, alike, strict=True)
            mark(node for node, other in pairs if sizes(node) == sizes(other))


def mark(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        node.meta[ONCE] = True


def by_line(nodes: Iterable[fx.Node]) -> dict[tuple[str, str], list[fx.Node]]:
    """Draws of the same kind on the same line of the model, in order."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for node in nodes:
        found.setdefault((line(node), str(node.target)), []).append(node)
    return found


def may_be_shared(node: fx.Node, follow: Collection[fx.Node], rows: int) -> bool:
    """Whether it takes another trace to know. Most draws follow the batch, and have its rows.

    A single number may be drawn for all rows, or for each of them in a loop.
    """
    return not (node in follow and any(has_rows(s, rows) for s in sizes(node)))


def has_rows(size: str, rows: int) -> bool:
    """Whether a size looks like that of rows. Those of experts are known only when they run."""
    return not size.isdigit() or size == "1" == str(rows) or (rows > 1 and int(size) % rows == 0)


def depending(graph: fx.Graph, batch: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose values follow those of the batch."""
    found = set(batch)
    for node in graph.nodes:
        like = str(node.target).rpartition(".")[0].endswith(LIKE)
        if not like and any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def draws(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_random(node) and not node.meta.get(ONCE)]


def sizes(node: fx.Node) -> list[str]:
    """Of the first tensor that it gives. Some are known only when the graph runs."""
    leaves = [leaf for leaf in pytree.tree_leaves(value(node)) if isinstance(leaf, Tensor)]
    return list(map(str, leaves[0].shape)) if leaves else []


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
