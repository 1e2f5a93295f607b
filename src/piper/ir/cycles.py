"""Cycles, with the reason for each edge."""

from __future__ import annotations

from collections.abc import Iterator

from piper.ir.dag import Dag
from piper.ir.graph import Topology
from piper.names import NodeId

DATA_FLOW = "data flow"


def cycle(dag: Dag) -> list[tuple[NodeId, str]]:
    """The nodes of one cycle, each with the reason why the next one waits; empty without one."""
    graph = dag.topology
    left = graph.stuck
    if not left:
        return []
    before = {k: j for j in left for k in graph.successors[j] if k in left}
    seen: dict[int, int] = {}
    walk: list[int] = []
    at = min(left)
    while at not in seen:
        seen[at] = len(walk)
        walk.append(at)
        at = before[at]
    return list(reasons(dag, graph, walk[seen[at] :][::-1]))


def reasons(dag: Dag, graph: Topology, loop: list[int]) -> Iterator[tuple[NodeId, str]]:
    count = len(graph.ids)
    for here, following in zip(loop, [*loop[1:], loop[0]], strict=True):
        if here < count:
            why = str(dag.precedences[following - count].maker) if following >= count else DATA_FLOW
            yield graph.ids[here], why
