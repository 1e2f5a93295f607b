"""Which row of the batch a value of a loop over rows belongs to."""

import operator
from collections.abc import Collection, Iterable

from torch import fx

from piper.capture.fx_nodes import arguments
from piper.capture.trace.decisions.row_order import operation, sizes

SEVERAL = -1  # in place of a row


def rows_in_loops(graph: fx.Graph, first: Collection[fx.Node], rows: int) -> dict[fx.Node, int]:
    """The row of each value that depends on one row only, or is used for one only.

    `first`: values that have rows in their first dimension.
    """
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        row = _taken(node, first, rows)
        own = _only(found.get(one) for one in node.all_input_nodes) if row is None else row
        if own is not None:
            found[node] = own
    for node in reversed(graph.nodes):
        if node not in found and (own := _only(map(found.get, node.users))) is not None:
            found[node] = own
    return {node: row for node, row in found.items() if row != SEVERAL}


def _only(rows: Iterable[int | None]) -> int | None:
    known = {row for row in rows if row is not None}
    return None if not known else known.pop() if len(known) == 1 else SEVERAL


def _taken(node: fx.Node, first: Collection[fx.Node], rows: int) -> int | None:
    """The row that a node takes out of all, as `x[k]` and `for row in x` do."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        inside = operation(source) == "unbind" and _has_rows(source, first, rows)
        return node.args[1] if inside else None
    if operation(node) not in ("select", "slice") or not _has_rows(node, first, rows):
        return None
    given = arguments(node)
    if operation(node) == "select":
        return given["index"] % rows
    return (given.get("start") or 0) % rows if sizes(node)[0] == "1" and rows > 1 else None


def _has_rows(node: fx.Node, first: Collection[fx.Node], rows: int) -> bool:
    """Whether an operator works along the rows of what it reads."""
    source = node.all_input_nodes[0]
    return source in first and sizes(source)[0] == str(rows) and arguments(node).get("dim", 0) == 0
