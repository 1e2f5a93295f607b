"""From the plan of a role to the plans of all its devices.

Devices of one role run the same instructions. What differs is whom they meet (peers and groups),
which shard of a bucket they hold, and which gradients they count for the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from piper.ir.by_device.roles import Groups, Roles, Row
from piper.names import Device
from piper.plan.instructions import Exchange, Gather, Plan, Redistribute, Reduce, State

Meeting = Reduce | Gather | Exchange | Redistribute  # of a group of devices
Grouping = int | None  # position among the groupings of the job; None: one device, no group
Turn = tuple[str, Grouping, int]  # a gradient, and which member of its group counts it


@dataclass(frozen=True)
class JobGroups:
    """The roles of a job, and all lists of groups that its plans use: the same on all devices."""

    roles: Roles
    groupings: tuple[Groups, ...]

    @cached_property
    def seats(self) -> tuple[Mapping[Device, tuple[Row, int]], ...]:
        """For each list of groups: the group of a device, and its position there."""
        return tuple(
            {device: (group, k) for group in groups for k, device in enumerate(group)}
            for groups in self.groupings
        )

    def group(self, number: int, device: Device) -> Row:
        return self.seats[number][device][0]

    def position(self, number: Grouping, device: Device) -> int:
        return 0 if number is None else self.seats[number][device][1]


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The plan of the first device of a role, and what another device must put in its place."""

    plan: Plan
    meetings: tuple[int, ...]  # of each collective and token all-to-all: its grouping
    holdings: tuple[tuple[Grouping, Grouping], ...]  # of each state: shards, shares of experts
    turns: tuple[Turn, ...]  # all gradients of the norm that devices of this role hold

    @property
    def home_states(self) -> Iterator[tuple[State, tuple[Grouping, Grouping]]]:
        pairs = zip(self.plan.states, self.holdings, strict=True)
        return ((state, how) for state, how in pairs if state.home)

    @property
    def collectives(self) -> Iterator[tuple[str, int]]:
        """The stream and grouping of each collective."""
        met = (one for one in self.plan.instructions if isinstance(one, Meeting))
        return ((one.stream, number) for one, number in zip(met, self.meetings, strict=True))


@dataclass(slots=True)
class DeviceSeat:
    """What a device puts in place of what the first device of its role has."""

    role: RolePlan
    job: JobGroups
    device: Device
    peers: Mapping[Device, Device]
    meetings: Iterator[int]

    def peer(self, device: Device) -> Device:
        return self.peers[device]

    def group(self) -> Row:
        return self.job.group(next(self.meetings), self.device)

    def counted(self) -> tuple[str, ...]:
        return tuple(counted(self.role.turns, self.job, self.device))


def bind(role: RolePlan, job: JobGroups, device: Device) -> Plan:
    """The plan of a device of this role."""
    seat = DeviceSeat(role, job, device, job.roles.peers(device), iter(role.meetings))
    states = (
        replace(state, shard=job.position(shards, device), share=job.position(shares, device))
        for state, (shards, shares) in zip(role.plan.states, role.holdings, strict=True)
    )
    code = tuple(one.bound(seat) for one in role.plan.instructions)
    return replace(role.plan, device=device, states=tuple(states), instructions=code)


def counted(turns: Sequence[Turn], job: JobGroups, device: Device) -> Iterator[str]:
    """The gradients that a device counts. Where a group holds the same sum, members take turns."""
    for gradient, number, turn in turns:
        if number is None or is_turn(job.group(number, device), turn, device):
            yield gradient


def is_turn(group: Row, turn: int, device: Device) -> bool:
    return group[turn % len(group)] == device
