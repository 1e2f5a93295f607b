"""Upward ranks, the priorities of list scheduling: time from each node to the end of the step."""

from __future__ import annotations

from collections.abc import Sequence

from piper.ir.dag import Dag


def upward_ranks(dag: Dag, durations: Sequence[float]) -> list[float]:
    """Seconds on the longest path from the start of a node to the end, over data and orders.

    Empty if no region is sharded or divided: then nothing in a slot has to wait, and any order
    is as good.
    """
    if not (dag.shardings or dag.divisions):
        return []
    graph, count = dag.topology, len(dag.nodes)
    found = [0.0] * len(graph.successors)
    for k in reversed(graph.in_order):
        own = durations[k] if k < count else 0.0
        found[k] = own + max((found[after] for after in graph.successors[k]), default=0.0)
    return found
