"""Cycles, with the reason for each edge; and lanes, the devices that run one list of nodes."""

from __future__ import annotations

from collections.abc import Iterator

from piper.ir.dag import Dag
from piper.ir.devices import lists_once
from piper.ir.graph import Topology
from piper.ir.nodes import Totals
from piper.names import Device, NodeId

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


def lanes(dag: Dag) -> dict[tuple[Device, ...], int]:
    """The lane of each device list. Lists that share a device are in one lane."""
    root: dict[Device, Device] = {}

    def find(device: Device) -> Device:
        while root.setdefault(device, device) != device:
            device = root[device]
        return device

    nodes = [node.devices for node in dag.nodes.values() if not isinstance(node, Totals)]
    lists = lists_once(nodes)
    for devices in lists:
        for device in devices[1:]:
            root[find(device)] = find(devices[0])
    number: dict[Device, int] = {}
    return {devices: number.setdefault(find(devices[0]), len(number)) for devices in lists}
