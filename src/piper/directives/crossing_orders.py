"""Orders of passes on several devices that read as if a pass ran before one that it needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache

from piper.ir.dag import Dag
from piper.ir.graph import Topology
from piper.ir.maker import Maker
from piper.ir.nodes import Compute
from piper.names import NodeId

LOG = logging.getLogger("piper")
CHECKED = 32  # orders: each takes a look at the whole DAG
Slots = Sequence[Sequence[Compute]]


def note_crossings(
    dag: Dag, orders: Sequence[tuple[Maker, Slots]], lane_of: dict[tuple[int, ...], int]
) -> None:
    """Warn of lists that contradict the dataflow between devices.

    They order each device by itself, so this is legal. But the list does not say what happens.
    """
    several = [one for one in orders if len(lanes_of(one[1], lane_of)) > 1]
    graph = dag.data_flow if several else None
    for name, slots in several[:CHECKED]:
        assert graph is not None
        lane = {node.id: lane_of[node.devices] for slot in slots for node in slot if node.devices}
        for early, late in crossings(graph, slots):
            if lane[early] == lane[late]:  # a cycle, which is an error
                continue
            warn_crossing(
                f"{name} lists {early} before {late}, which it needs from another device. An order "
                f"of passes holds on each device by itself: {late} runs first"
            )
            break


@lru_cache(maxsize=64)
def warn_crossing(line: str) -> None:
    """Once: a strategy is applied several times, to compare what may be chosen."""
    LOG.warning("%s", line)


def lanes_of(slots: Slots, lane_of: dict[tuple[int, ...], int]) -> set[int]:
    return {lane_of[node.devices] for slot in slots for node in slot if node.devices}


def crossings(graph: Topology, slots: Slots) -> Iterator[tuple[NodeId, NodeId]]:
    """Passes that are listed before one that they need, with that one."""
    at = {node.id: number for number, slot in enumerate(slots) for node in slot}
    latest: list[int | None] = [None] * len(graph.ids)  # of what a node needs: the last one listed
    indegree = list(graph.indegree)
    ready = [k for k, degree in enumerate(indegree) if not degree]

    def place(k: int | None) -> int:
        return -1 if k is None else at[graph.ids[k]]

    for k in ready:  # grows
        mine = at.get(graph.ids[k])
        before = latest[k]
        if mine is not None and before is not None and place(before) > mine:
            yield graph.ids[k], graph.ids[before]
        last = k if mine is not None and mine > place(before) else before
        for after in graph.successors[k]:
            if place(last) > place(latest[after]):
                latest[after] = last
            indegree[after] -= 1
            if not indegree[after]:
                ready.append(after)
