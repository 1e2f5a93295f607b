"""How long it takes from each node to the end of the step: what has more before it goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.ir.dag import Dag
from piper.ir.graph import Topology


def ranks(dag: Dag, durations: Sequence[float]) -> list[float]:
    """Seconds on the longest way from the start of a node to the end, over data and orders.

    Empty where no tokens travel: then nothing in a slot has to wait, and its order is as good as
    any other.
    """
    if not dag.shardings:
        return []
    graph, count = dag.topology, len(dag.nodes)
    found = [0.0] * len(graph.successors)
    for k in reversed(list(in_order(graph))):
        own = durations[k] if k < count else 0.0
        found[k] = own + max((found[after] for after in graph.successors[k]), default=0.0)
    return found


def in_order(graph: Topology) -> Iterator[int]:
    """Vertices, each after what it waits for."""
    left = list(graph.indegree)
    ready = [k for k, degree in enumerate(left) if not degree]
    while ready:
        k = ready.pop()
        yield k
        for after in graph.successors[k]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
