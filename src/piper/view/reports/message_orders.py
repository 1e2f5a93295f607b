"""The orders of a strategy that name messages or updates, as the DAG keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.names import NodeId, amount

MOST = 4  # names of a slot
SHOWN = 12  # orders


def message_orders(dag: Dag) -> str:
    """Empty if no order names a message or an update."""
    return "\n".join(lines(dag))


def lines(dag: Dag) -> Iterator[str]:
    found = [p for p in dag.precedences if p.partial and names_more(dag, (*p.before, *p.after))]
    for order in found[:SHOWN]:
        yield f"{listed(order.before)} -> {listed(order.after)}  # {order.maker}"
    if len(found) > SHOWN:
        yield f"and {amount(len(found) - SHOWN, 'other order')} with messages or updates"


def names_more(dag: Dag, names: Sequence[NodeId]) -> bool:
    return not all(isinstance(dag.nodes[name], Compute) for name in names)


def listed(names: Sequence[NodeId]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{', '.join(names[:MOST])}{more}"
