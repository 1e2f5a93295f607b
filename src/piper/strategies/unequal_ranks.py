"""Pipelines whose ranks have different numbers of devices: `dp=[2, 4]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from math import lcm

from piper.errors import StrategyError
from piper.names import Device, amount
from piper.strategies.schedules.sizes import MOST_ACTIONS

Replication = int | Sequence[int]  # replicas of every rank, or of each


def unequal_homes(
    places: Mapping[int, Sequence[int]],
    counts: Sequence[int],
    pp: int,
    devices: Sequence[Device] | None = None,
    ways: int = 1,
    **others: object,
) -> dict[int, tuple[Device, ...]]:
    """The devices of each stage, `ways` for each replica. Devices are numbered rank by rank.

    A stage of several ranks (DualPipe) has equally many replicas on each.

    >>> unequal_homes({0: (0,), 1: (1,)}, [1, 2], 2)
    {0: (0,), 1: (1, 2)}
    >>> unequal_homes({0: (0, 1), 1: (1, 0)}, [1, 2], 2)
    {0: (0, 0, 1, 2), 1: (1, 2, 0, 0)}
    >>> unequal_homes({0: (0,), 1: (1,)}, [1, 2], 2, ways=2)
    {0: (0, 1), 1: (2, 3, 4, 5)}
    """
    require_unequal(counts, pp, devices, others)
    known = range(sum(counts) * ways) if devices is None else devices
    teams = [tuple(known[k : k + ways]) for k in range(0, len(known), ways)]
    ends = list(accumulate(counts))
    own = [teams[end - count : end] for count, end in zip(counts, ends, strict=True)]
    most = lcm(*counts)
    times = [most // count for count in counts]
    return {
        stage: tuple(chain.from_iterable(own[ranks[0]]))
        if len(ranks) == 1
        else tuple(d for rank in ranks for team in own[rank] for d in team * times[rank])
        for stage, ranks in places.items()
    }


def stage_speeds(
    places: Mapping[int, Sequence[int]],
    pp: int,
    dp: Replication,
    speeds: Sequence[float] | None,
) -> tuple[float, ...] | None:
    """How fast each stage is: the devices of its slowest rank together. None: all are equal.

    >>> stage_speeds({0: (0,), 1: (1,), 2: (1,), 3: (0,)}, 2, [1, 2], [3, 1])
    (3, 2, 2, 3)
    """
    if speeds is not None and len(speeds) != pp:
        what = f"speeds={list(speeds)} does not say how fast each of {amount(pp, 'rank')} is"
        raise wrong(what, f"write a number for each: speeds={[2] + [1] * (pp - 1)}")
    if speeds is None and isinstance(dp, int):
        return None
    counts = [1] * pp if isinstance(dp, int) else dp
    ranks = [n * speed for n, speed in zip(counts, speeds or [1] * pp, strict=True)]
    return tuple(min(ranks[rank] for rank in places[stage]) for stage in sorted(places))


def require_unequal(
    counts: Sequence[int], pp: int, devices: Sequence[Device] | None, others: Mapping[str, object]
) -> None:
    """`others` are options that need equally many devices everywhere, where they are used."""
    shown = f"dp={list(counts)}"
    valid = all(type(count) is int and count >= 1 for count in counts)
    if len(counts) != pp or not valid or sum(counts) > MOST_ACTIONS:
        what = f"{shown} does not say how many devices each of {amount(pp, 'rank')} has"
        raise wrong(what, f"write one whole number for each rank: dp={[2] * max(1, pp - 1) + [4]}")
    used = [name for name, is_used in others.items() if is_used]
    if used:
        what = f"{used[0]} needs as many devices for every rank, and {shown} has different numbers"
        raise wrong(what, f"leave out {used[0]}, or write one number: dp={max(counts)}")
    if devices is not None and (len(devices) != sum(counts) or len(set(devices)) != sum(counts)):
        what = f"devices={list(devices)} are not {sum(counts)} different devices, as {shown} says"
        raise wrong(what, "list every device once, rank by rank")


def wrong(what: str, fix: str) -> StrategyError:
    return StrategyError.of("strategy", what, fix)
