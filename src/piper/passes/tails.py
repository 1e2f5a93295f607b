"""How long it takes from each node to the end of its slot: what has more before it goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.ir.dag import Dag
from piper.ir.nodes import Exchange, Node
from piper.ir.topology import Topology


def tails(dag: Dag, durations: Sequence[float]) -> dict[int, float]:
    """For nodes that share a slot with others: seconds until the last of what needs them ends.

    Only where tokens travel: without exchanges nothing in a slot has to wait.
    """
    slots = slot_numbers(dag)
    if not dag.shardings or not slots:
        return {}
    nodes = list(dag.nodes.values())
    found: dict[int, float] = {}
    for k in reversed(list(in_order(dag.topology, len(nodes)))):
        if k in slots or isinstance(nodes[k], Exchange):
            after = [j for j in dag.topology.successors[k] if follows(k, j, slots, nodes)]
            found[k] = durations[k] + max((found[j] for j in after), default=0.0)
    return {k: tail for k, tail in found.items() if k in slots}


def slot_numbers(dag: Dag) -> dict[int, int]:
    """The slot of each node that an order names, numbered over all orders and devices."""
    position = {name: k for k, name in enumerate(dag.nodes)}
    groups: dict[tuple[str, ...], int] = {}
    found: dict[int, int] = {}
    for order in dag.precedences:
        if order.maker.startswith("order"):
            for names in (order.before, order.after):
                number = groups.setdefault(names, len(groups))
                found.update((position[name], number) for name in names)
    return found


def follows(k: int, after: int, slots: dict[int, int], nodes: Sequence[Node]) -> bool:
    """Whether a successor counts: in the same slot, or rows on their way."""
    if after >= len(nodes):
        return False
    if isinstance(nodes[k], Exchange) or isinstance(nodes[after], Exchange):
        return after in slots or isinstance(nodes[after], Exchange)
    return after in slots and slots[after] == slots.get(k)


def in_order(graph: Topology, count: int) -> Iterator[int]:
    """Nodes, each after what it waits for."""
    left = list(graph.indegree)
    ready = [k for k, degree in enumerate(left) if not degree]
    while ready:
        k = ready.pop()
        if k < count:
            yield k
        for after in graph.successors[k]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
