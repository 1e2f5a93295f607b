"""Whether some nodes run before others anyway: reachability of many pairs, in one sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.ir.dag import Dag
from piper.names import NodeId

Names = Sequence[NodeId]


def unreached(
    dag: Dag, pairs: Sequence[tuple[Names, Names]]
) -> Iterator[tuple[NodeId, NodeId] | None]:
    """For each pair of groups, a node of the first with no path to one of the second; else None.

    Each start is a bit, and a vertex has the bits of all starts before it.
    """
    if not pairs:
        return
    graph = dag.topology
    number = {name: k for k, name in enumerate(graph.ids)}
    starts = dict.fromkeys(name for before, _ in pairs for name in before)
    bit = {name: 1 << k for k, name in enumerate(starts)}
    reached = [0] * len(graph.successors)
    for k in graph.in_order:
        mine = bit.get(graph.ids[k], 0) if k < len(graph.ids) else 0
        for after in graph.successors[k]:
            reached[after] |= reached[k] | mine
    for starts_here, ends in pairs:
        apart = ((a, b) for b in ends for a in starts_here if not reached[number[b]] & bit[a])
        yield next(apart, None)


def ancestors(dag: Dag, name: NodeId) -> set[NodeId]:
    """All nodes whose results a node needs."""
    found, left = set[NodeId](), [name]
    while left:
        new = set(dag.predecessors(dag.nodes[left.pop()])) - found
        found |= new
        left += new
    return found
