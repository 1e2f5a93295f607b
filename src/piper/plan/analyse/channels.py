"""What plans need of their surroundings: communicators, and who speaks for a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.names import Device, Share
from piper.plan.instructions import Exchange, Gather, Plan, Recv, Reduce, Send, is_dynamic

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
                yield (one.stream, plan.device, one.peer), one


def streams(plans: Sequence[Plan]) -> list[str]:
    """The streams on which values go from device to device."""
    found = (one.stream for p in plans for one in p.instructions if isinstance(one, Send | Recv))
    return sorted(set(found))


def teams(plans: Sequence[Plan]) -> list[Team]:
    """The streams and groups of all collectives."""
    every = (one for plan in plans for one in plan.instructions)
    meetings = (one for one in every if isinstance(one, Reduce | Gather | Exchange))
    return sorted({(one.stream, one.group) for one in meetings})


def exchanging(plan: Plan) -> list[Team]:
    """The streams and groups in which rows of a device travel to experts."""
    return sorted({(o.stream, o.group) for o in plan.instructions if isinstance(o, Exchange)})


def first_holders(plans: Sequence[Plan]) -> dict[Device, list[str]]:
    """Of the states that several devices hold alike, those that each one speaks for."""
    first: dict[tuple[str, int, int], Device] = {}
    for plan in plans:
        for state in plan.states:
            if state.home:
                first.setdefault((state.bucket, state.share, state.shard), plan.device)
    spoken: dict[Device, list[str]] = {plan.device: [] for plan in plans}
    for (bucket, _, _), holder in first.items():
        spoken[holder].append(f"w:{bucket}")
    return spoken
