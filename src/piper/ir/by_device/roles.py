"""Roles: devices of one role have the same plan but for the numbers of their peers.

Replicas of the whole model often differ only in device numbers. Then the plans of one replica are
made, checked and simulated for all, and the work grows with the number of roles, not of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Exchange, Redistribute, Transfer
from piper.ir.placement.replicas import Replicas
from piper.names import Device

Groups = tuple[tuple[Device, ...], ...]
Row = tuple[Device, ...]


@dataclass(frozen=True)
class Roles:
    """Replica by replica, the device of each role. The first replica stands for all."""

    rows: tuple[Row, ...]
    obstacle: str = ""  # why several replicas have no roles in common; empty if they do

    @cached_property
    def of(self) -> Mapping[Device, Device]:
        """For each device the first that does the same."""
        return {d: role for row in self.rows for role, d in zip(self.rows[0], row, strict=True)}

    @cached_property
    def first(self) -> Row:
        """One device of each role, in rising order."""
        return tuple(sorted(self.rows[0]))

    @cached_property
    def row_of(self) -> Mapping[Device, Row]:
        """The replica of each device."""
        return {device: row for row in self.rows for device in row}

    def devices(self, role: Device) -> Row:
        """The devices of a role, replica by replica."""
        at = self.rows[0].index(role)
        return tuple(row[at] for row in self.rows)

    def peers(self, device: Device) -> Mapping[Device, Device]:
        """Whom a device meets where its role meets a device of the first replica.

        >>> Roles(((0, 1), (2, 3))).peers(3)
        {0: 2, 1: 3}
        """
        return dict(zip(self.rows[0], self.row_of[device], strict=True))


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


def own_roles(devices: Iterable[Device], obstacle: str = "") -> Roles:
    """Every device has a role of its own."""
    return Roles((tuple(devices),), obstacle)


def roles(dag: Dag) -> Roles:
    """The roles of all devices. If replicas differ, every device has its own role.

    Devices that divide a batch's work have different roles: each has its own part.
    """
    rows = alike(dag.replicas)
    if rows is None:
        return own_roles(dag.devices, "its replicas do not have the same regions on their devices")
    same = Roles(with_equal_sizes(dag, rows))
    obstacle = next(obstacles(dag, same), None)
    return same if obstacle is None else own_roles(dag.devices, obstacle)


def alike(found: Replicas) -> tuple[Row, ...] | None:
    """Replica by replica, the device of each role; None if they do not match one to one."""
    first = found.feeds[0]
    count = sum(map(len, found.feeds))
    same: dict[Device, Device] = {}
    taken: list[dict[Device, Device]] = [
        {} for _ in found.feeds
    ]  # of each feed: the device of a role
    for row in found.lists:
        if len(row) != count:
            return None
        for feed, has in zip(found.feeds, taken, strict=True):
            for mine, other in zip(first, feed, strict=True):
                role, device = row[mine], row[other]
                if same.setdefault(device, role) != role:
                    return None
                if has.setdefault(role, device) != device:
                    return None
    return tuple(tuple(has.values()) for has in taken)


def with_equal_sizes(dag: Dag, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Replicas with different numbers of rows have different roles: so many of each together."""
    kinds: dict[int, list[Row]] = {}
    for row in rows:
        kinds.setdefault(id(dag.seen_by(row[0])), []).append(row)
    count = gcd(*map(len, kinds.values()))
    return tuple(
        tuple(d for alike in kinds.values() for row in alike[k::count] for d in row)
        for k in range(count)
    )


def obstacles(dag: Dag, same: Roles) -> Iterator[str]:
    """What some replicas do and others do not."""
    for devices in device_lists(dag):
        if not is_closed(devices, same):
            yield f"devices {list(devices)} do something that others of their roles do not"
    for source, target in connections(dag):
        if not is_parallel(source, target, same):
            yield f"devices {list(source)} send to {list(target)}, not replica to replica"
    for groups in meetings(dag):
        if not fits(groups, same.of):
            yield f"the groups {list(map(list, groups))} have different roles in them"


def device_lists(dag: Dag) -> Iterable[Row]:
    """The devices of all nodes, each list once."""
    lists = (node.devices for node in dag.nodes.values() if node.devices is not None)
    return {id(devices): devices for devices in lists}.values()


def is_closed(devices: Sequence[Device], same: Roles) -> bool:
    """Whether all devices of a role are in the list, or none."""
    return len(set(devices)) == len({same.of[device] for device in devices}) * len(same.rows)


def connections(dag: Dag) -> Iterable[tuple[Row, Row]]:
    """The senders and receivers of all transfers, each pair of lists once."""
    nodes = (node for node in dag.nodes.values() if isinstance(node, Transfer))
    pairs = ((node.source, node.devices) for node in nodes)
    return {(id(source), id(target)): (source, target) for source, target in pairs}.values()


def is_parallel(source: Sequence[Device], target: Sequence[Device], same: Roles) -> bool:
    """Whether all messages stay in a replica, and every replica has the same ones in order."""
    sent: dict[int, list[tuple[Device, Device]]] = {id(row): [] for row in same.rows}
    for a, b in zip(source, target, strict=True):
        if same.row_of[a] is not same.row_of[b]:
            return False
        sent[id(same.row_of[a])].append((same.of[a], same.of[b]))
    first = sent[id(same.rows[0])]
    return all(messages == first for messages in sent.values())


def meetings(dag: Dag) -> Iterable[Groups]:
    """The groups of all collectives, each once."""
    nodes = (n for n in dag.nodes.values() if isinstance(n, Collective | Exchange | Redistribute))
    return {id(node.groups): node.groups for node in nodes}.values()


def fits(groups: Groups, same: Mapping[Device, Device]) -> bool:
    """Whether devices of a role always meet the same roles, and the first ones meet each other."""
    meets: dict[Device, Row] = {}
    for group in groups:
        kind = tuple(sorted(same[device] for device in group))
        if any(meets.setdefault(role, kind) != kind for role in kind):
            return False
    by_device = {device: group for group in groups for device in group}
    return all(len({by_device[role] for role in kind}) == 1 for kind in set(meets.values()))
