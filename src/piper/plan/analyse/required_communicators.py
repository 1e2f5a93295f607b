"""The communicators that plans need, and the device that reports each state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from piper.names import Device, Share
from piper.plan.analyse.mailbox_sizes import Link, MailboxSize, mailbox_sizes
from piper.plan.binding import Grouping, JobGroups, RolePlan
from piper.plan.instructions import Exchange, Gather, Plan, Reduce, Send, Total, is_dynamic
from piper.plan.instructions.sizes import shape_bytes

Team = tuple[str, tuple[Device, ...]]  # a stream, and the process group on it
Holder = tuple[Device, Grouping, Grouping]  # a role, how its shards and shares of experts lie


@dataclass(frozen=True, slots=True)
class RequiredCommunicators:
    """All communicators of a job, the same on every device.

    Only `token_groups`, `token_bytes` and `mailboxes` are of one device.
    """

    streams: Sequence[str] = ()
    teams: Sequence[Team] = ()
    links: Sequence[Link] = ()
    token_groups: Sequence[Team] = ()
    token_bytes: Mapping[Team, int] = field(default_factory=dict)  # of the largest all-to-all
    shares: Sequence[Share] = ()  # SMs and priorities of streams
    dynamic_links: Sequence[Link] = ()  # links that carry values of dynamic size
    totals: Team | None = None  # whose communicator adds up the loss and norm; None: its own
    mailboxes: Mapping[Link, MailboxSize] = field(default_factory=dict)  # by link to this device


@dataclass(frozen=True, slots=True)
class RoleMeetings:
    """Where the roles of a job meet, and which of them hold each bucket at home."""

    links: tuple[Link, ...]  # of the first replica
    dynamic_links: tuple[Link, ...]
    collectives: tuple[tuple[str, int], ...]  # streams and groupings, without the loss and norm
    holders: Mapping[str, tuple[Holder, ...]]


def role_meetings(roles: Sequence[RolePlan]) -> RoleMeetings:
    holders: dict[str, tuple[Holder, ...]] = {}
    for role in roles:
        for state, how in role.home_states:
            holder = (role.plan.device, *how)
            holders[state.bucket] = (*holders.get(state.bucket, ()), holder)
    every = list(sends(roles))
    return RoleMeetings(
        links=tuple(sorted({link for link, _ in every})),
        dynamic_links=tuple(sorted({link for link, one in every if is_sized_by_data(one)})),
        collectives=tuple(sorted({pair for role in roles for pair in role.collectives})),
        holders=holders,
    )


def sends(roles: Sequence[RolePlan]) -> Iterator[tuple[Link, Send]]:
    for plan in (role.plan for role in roles):
        for one in plan.instructions:
            if isinstance(one, Send):
                yield one.communicator(plan.device), one


def is_sized_by_data(one: Send) -> bool:
    """Whether the sizes are sent first, because they depend on data."""
    return any(map(is_dynamic, one.shapes))


def required_communicators(met: RoleMeetings, job: JobGroups, plan: Plan) -> RequiredCommunicators:
    """Those of all devices, in one order everywhere, and the token groups of this plan."""
    groups = {(stream, group) for stream, k in met.collectives for group in job.groupings[k]}
    return RequiredCommunicators(
        streams=tuple(sorted({stream for stream, _, _ in met.links})),
        teams=tuple(sorted(groups)),
        links=tuple(in_all_replicas(met.links, job)),
        token_groups=tuple(token_groups(plan)),
        token_bytes=token_bytes(plan),
        shares=plan.streams,
        dynamic_links=tuple(in_all_replicas(met.dynamic_links, job)),
        totals=totals_team(job, plan),
        mailboxes=mailbox_sizes(plan),
    )


def totals_team(job: JobGroups, plan: Plan) -> Team | None:
    """Where all devices run the same plan, the last communicator of them all before the totals.

    There, all messages have one order. A communicator of its own costs memory, and its thread waits
    busily for the GPU from the moment that the host gets to the totals.
    """
    everyone = tuple(sorted(job.roles.of))
    if len(everyone) == 1 or len(set(job.roles.of.values())) > 1:
        return None
    found, exchanging = None, token_groups(plan)
    for one in plan.instructions:
        if isinstance(one, Total):
            break
        if isinstance(one, Reduce | Gather) and tuple(sorted(one.group)) == everyone:
            team = one.stream, one.group
            found = found if team in exchanging else team
    return found


def in_all_replicas(links: Sequence[Link], job: JobGroups) -> list[Link]:
    """The links of all replicas, from those of the first."""
    rows = [dict(zip(job.roles.rows[0], row, strict=True)) for row in job.roles.rows]
    return sorted((stream, row[a], row[b]) for row in rows for stream, a, b in links)


def token_groups(plan: Plan) -> list[Team]:
    """The streams and groups of a device's token all-to-alls."""
    return sorted({(o.stream, o.group) for o in plan.instructions if isinstance(o, Exchange)})


def token_bytes(plan: Plan) -> dict[Team, int]:
    """By group, the bytes of all rows that a device brings to its largest token all-to-all.

    Rows whose number depends on data count as nothing.
    """
    found = dict[Team, int]()
    for one in plan.instructions:
        if isinstance(one, Exchange):
            team, size = (one.stream, one.group), sum(map(shape_bytes, one.shapes))
            found[team] = max(found.get(team, 0), size)
    return found


def state_turns(
    met: RoleMeetings,
    job: JobGroups,
    plan: Plan,
    first: Mapping[str, Device] = MappingProxyType({}),
) -> dict[str, tuple[int, int]]:
    """Of each state at home: which of the devices that hold it this one is, of how many.

    What is written once is divided between them; of what is reported whole, the first reports. Of
    some buckets it is said which device is the `first`.
    """
    found = {}
    for state in plan.states:
        if state.home:
            known = met.holders[state.bucket]
            devices = set(holding(known, job, state.shard, state.share))
            holders = in_turn(devices, first.get(state.bucket))
            found[state.value] = holders.index(plan.device), len(holders)
    return found


def in_turn(devices: set[Device], first: Device | None) -> list[Device]:
    return sorted(devices, key=lambda device: (device != first, device))


def holding(holders: Sequence[Holder], job: JobGroups, shard: int, share: int) -> Iterator[Device]:
    """The devices that hold this shard of this share of a bucket."""
    for role, shards, shares in holders:
        for device in job.roles.devices(role):
            held = job.position(shards, device), job.position(shares, device)
            if held == (shard, share):
                yield device
