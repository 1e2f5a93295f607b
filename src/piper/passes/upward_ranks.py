"""Upward ranks, the priorities of list scheduling: time from each node to the end of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.ir.dag import Dag
from piper.ir.graph import Topology


def upward_ranks(dag: Dag, durations: Sequence[float]) -> list[float]:
    """Seconds on the longest path from the start of a node to the end, over data and orders.

    Empty if no region is sharded or divided: then nothing in a slot has to wait, and any order
    is as good.
    """
    if not (dag.shardings or dag.divisions):
        return []
    graph, count = dag.topology, len(dag.nodes)
    found = [0.0] * len(graph.successors)
    for k in reversed(list(in_order(graph))):
        own = durations[k] if k < count else 0.0
        found[k] = own + max((found[after] for after in graph.successors[k]), default=0.0)
    return found


def in_order(graph: Topology) -> Iterator[int]:
    """Vertices in topological order."""
    left = list(graph.indegree)
    ready = [k for k, degree in enumerate(left) if not degree]
    while ready:
        k = ready.pop()
        yield k
        for after in graph.successors[k]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
