"""Roles: devices of one role have the same plan but for the numbers of their peers.

Replicas of the whole model often differ only in device numbers. Then the plans of one replica are
checked and simulated for all, and the work grows with the number of roles, not of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Exchange, Redistribute
from piper.ir.replicas import Replicas
from piper.names import Device

Groups = tuple[tuple[Device, ...], ...]


@dataclass(frozen=True, slots=True)
class Roles:
    """For each device, the first device of its role."""

    of: Mapping[Device, Device]

    @property
    def first(self) -> tuple[Device, ...]:
        """One device of each role, in rising order."""
        return tuple(sorted(set(self.of.values())))


class Present:
    """The devices of a list that have a plan here. Cached by list."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self.devices = frozenset(devices)
        self.known: dict[int, tuple[tuple[Device, ...], tuple[Device, ...]]] = {}

    def of(self, devices: tuple[Device, ...] | None) -> tuple[Device, ...]:
        """
        >>> Present([0, 1]).of((1, 3, 5))
        (1,)
        """
        if devices is None:
            return ()
        found = self.known.get(id(devices))
        if found is None or found[0] is not devices:  # hashing long lists would take too long
            here = tuple(device for device in devices if device in self.devices)
            found = self.known[id(devices)] = (devices, here)
        return found[1]


def roles(dag: Dag) -> Roles:
    """The roles of all devices. If replicas differ, every device has its own role."""
    same = alike(dag.replicas)
    if same is None or not all(fits(groups, same) for groups in meetings(dag)):
        return Roles({device: device for device in dag.devices})
    return Roles(same)


def same_replica(dag: Dag, device: Device) -> tuple[Device, ...]:
    """All devices that a device exchanges activations with, directly or not, in rising order."""
    found = dag.replicas
    feed = found.feeds[found.feed(device)]
    return tuple(sorted({row[k] for row in found.lists for k in feed if k < len(row)}))


def alike(found: Replicas) -> dict[Device, Device] | None:
    """Each device's counterpart in the first feed; None if they do not match one to one."""
    first = found.feeds[0]
    count = sum(map(len, found.feeds))
    same: dict[Device, Device] = {}
    taken: dict[tuple[int, Device], Device] = {}  # (feed, role) -> the device that has it
    for row in found.lists:
        if len(row) != count:
            return None
        for number, feed in enumerate(found.feeds):
            for mine, other in zip(first, feed, strict=True):
                role, device = row[mine], row[other]
                if same.setdefault(device, role) != role:
                    return None
                if taken.setdefault((number, role), device) != device:
                    return None
    return same


def meetings(dag: Dag) -> Iterable[Groups]:
    """The groups of all collectives, each once."""
    nodes = (n for n in dag.nodes.values() if isinstance(n, Collective | Exchange | Redistribute))
    return {id(node.groups): node.groups for node in nodes}.values()


def fits(groups: Groups, same: Mapping[Device, Device]) -> bool:
    """Whether all groups have the same roles, and the first devices of these roles meet in one."""
    kinds = {tuple(sorted(same[device] for device in group)) for group in groups}
    if len(kinds) > 1:
        return False
    several = set(next(iter(kinds), ()))
    firsts = set(same.values())
    present = [firsts & set(group) for group in groups if firsts & set(group)]
    return len(several) == 1 or set(chain.from_iterable(present)) == several == present[0]
