"""Lanes: the devices that run one list of nodes, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from piper.ir.nodes import Node, Totals
from piper.ir.placement.devices import lists_once
from piper.names import Device


def lanes_of(nodes: Iterable[Node]) -> dict[tuple[Device, ...], int]:
    """The lane of each device list. Lists that share a device are in one lane."""
    root: dict[Device, Device] = {}

    def find(device: Device) -> Device:
        while root.setdefault(device, device) != device:
            device = root[device]
        return device

    lists = lists_once([node.devices for node in nodes if not isinstance(node, Totals)])
    for devices in lists:
        for device in devices[1:]:
            root[find(device)] = find(devices[0])
    number: dict[Device, int] = {}
    return {devices: number.setdefault(find(devices[0]), len(number)) for devices in lists}
