"""The communicators that plans need, and the device that reports each state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.names import TOTALS_STREAM, Device, Share
from piper.plan.communicator import Channel, Communicator, Group
from piper.plan.instructions import Exchange, Plan, Send, is_dynamic

Team = tuple[str, tuple[Device, ...]]  # a stream, and the process group on it
Link = tuple[str, Device, Device]  # a stream, sender, receiver


@dataclass(frozen=True, slots=True)
class RequiredCommunicators:
    """All communicators of a job, the same on every device; `token_groups` are of one device."""

    streams: Sequence[str] = ()
    teams: Sequence[Team] = ()
    links: Sequence[Link] = ()
    token_groups: Sequence[Team] = ()
    shares: Sequence[Share] = ()  # SMs and priorities of streams
    dynamic_links: Sequence[Link] = ()  # links that carry values of dynamic size


def required_communicators(plans: Sequence[Plan]) -> RequiredCommunicators:
    """What all devices have in common. Each device adds its own `token_groups`."""
    shares = plans[0].streams if plans else ()
    common = tuple(streams(plans)), tuple(teams(plans)), tuple(links(plans))
    return RequiredCommunicators(*common, shares=shares, dynamic_links=tuple(dynamic_links(plans)))


def links(plans: Sequence[Plan]) -> list[Link]:
    """The streams, senders and receivers of all transfers."""
    return sorted({link for link, _ in sends(plans)})


def dynamic_links(plans: Sequence[Plan]) -> list[Link]:
    """The links that send sizes first, because these depend on data."""
    return sorted({link for link, one in sends(plans) if any(map(is_dynamic, one.shapes))})


def sends(plans: Sequence[Plan]) -> Iterator[tuple[Link, Send]]:
    for plan in plans:
        for one in plan.instructions:
            if isinstance(one, Send):
                yield one.communicator(plan.device), one


def streams(plans: Sequence[Plan]) -> list[str]:
    """The streams that have point-to-point transfers."""
    return sorted({one.stream for one in communicators(plans) if isinstance(one, Channel)})


def teams(plans: Sequence[Plan]) -> list[Team]:
    """The streams and groups of all collectives, without the loss and norm all-reduce."""
    groups = (one for one in communicators(plans) if isinstance(one, Group))
    return sorted(one for one in groups if one.stream != TOTALS_STREAM)


def communicators(plans: Sequence[Plan]) -> set[Communicator]:
    every = (one.communicator(plan.device) for plan in plans for one in plan.instructions)
    return {one for one in every if one is not None}


def token_groups(plan: Plan) -> list[Team]:
    """The streams and groups of a device's token all-to-alls."""
    return sorted({(o.stream, o.group) for o in plan.instructions if isinstance(o, Exchange)})


def reported_states(plans: Sequence[Plan]) -> dict[Device, list[str]]:
    """Device -> the states that it reports. Of equal states, the first device reports."""
    seen: set[tuple[str, int, int]] = set()
    reported: dict[Device, list[str]] = {plan.device: [] for plan in plans}
    for plan in plans:
        for state in plan.states:
            same = (state.bucket, state.share, state.shard)
            if state.home and same not in seen:
                seen.add(same)
                reported[plan.device].append(state.value)
    return reported
