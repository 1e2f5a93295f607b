"""What plans need of their surroundings: communicators, and who speaks for a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.names import TOTALS_STREAM, Device, Share
from piper.plan.instructions import Exchange, Plan, Send, is_dynamic
from piper.plan.meeting import Channel, Group, Meeting

Team = tuple[str, tuple[Device, ...]]  # a stream, and devices that meet on it
Link = tuple[str, Device, Device]  # a stream, who sends, who receives


@dataclass(frozen=True, slots=True)
class Needs:
    """All communicators of a job, the same on every device; and where this one exchanges rows."""

    streams: Sequence[str] = ()
    teams: Sequence[Team] = ()
    links: Sequence[Link] = ()
    exchanging: Sequence[Team] = ()
    shares: Sequence[Share] = ()  # what streams get of a GPU
    sized: Sequence[Link] = ()  # those links on which something of unknown size goes


def needs(plans: Sequence[Plan]) -> Needs:
    """What all devices have in common: each adds where it exchanges rows itself."""
    shares = plans[0].streams if plans else ()
    ways = tuple(streams(plans)), tuple(teams(plans)), tuple(links(plans))
    return Needs(*ways, shares=shares, sized=tuple(sized(plans)))


def links(plans: Sequence[Plan]) -> list[Link]:
    """Who sends to whom, on which stream."""
    return sorted({link for link, _ in sends(plans)})


def sized(plans: Sequence[Plan]) -> list[Link]:
    """The links on which sizes come before what depends on data for them."""
    return sorted({link for link, one in sends(plans) if any(map(is_dynamic, one.shapes))})


def sends(plans: Sequence[Plan]) -> Iterator[tuple[Link, Send]]:
    for plan in plans:
        for one in plan.instructions:
            if isinstance(one, Send):
                yield one.meeting(plan.device), one


def streams(plans: Sequence[Plan]) -> list[str]:
    """The streams on which values go from device to device."""
    return sorted({one.stream for one in meetings(plans) if isinstance(one, Channel)})


def teams(plans: Sequence[Plan]) -> list[Team]:
    """The streams and groups of all collectives. Totals have a group of their own."""
    groups = (one for one in meetings(plans) if isinstance(one, Group))
    return sorted(one for one in groups if one.stream != TOTALS_STREAM)


def meetings(plans: Sequence[Plan]) -> set[Meeting]:
    every = (one.meeting(plan.device) for plan in plans for one in plan.instructions)
    return {one for one in every if one is not None}


def exchanging(plan: Plan) -> list[Team]:
    """The streams and groups in which rows of a device travel to experts."""
    return sorted({(o.stream, o.group) for o in plan.instructions if isinstance(o, Exchange)})


def first_holders(plans: Sequence[Plan]) -> dict[Device, list[str]]:
    """Of the states that several devices hold alike, those that each one speaks for."""
    seen: set[tuple[str, int, int]] = set()
    spoken: dict[Device, list[str]] = {plan.device: [] for plan in plans}
    for plan in plans:
        for state in plan.states:
            same = (state.bucket, state.share, state.shard)
            if state.home and same not in seen:
                seen.add(same)
                spoken[plan.device].append(state.value)
    return spoken
