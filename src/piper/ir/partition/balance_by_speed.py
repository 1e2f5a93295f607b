"""Cut weights into stages of different speed, so that the slowest stage takes the least time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from piper.ir.partition.balance import ROUNDING, Memory

Cut = tuple[float, float, tuple[int, ...]]  # time of the slowest stage, sum of squares, sizes


def balanced_by_speed(
    weights: Sequence[float], speeds: Sequence[float], memory: Memory | None = None
) -> tuple[int, ...] | None:
    """How many of the weights each stage gets, in order, at least one. None: no cut has room.

    >>> balanced_by_speed([1.0] * 8, [3.0, 1.0])
    (6, 2)
    """
    best: dict[int, Cut] = {len(weights): (0.0, 0.0, ())}
    starts = possible_starts(weights, speeds, memory)
    for stage in reversed(range(len(speeds))):
        found = {
            first: longer(weights, speeds[stage], stage, first, best, memory)
            for first in starts[stage]
        }
        best = {first: cut for first, cut in found.items() if cut is not None}
    return best[0][2] if 0 in best else None


def possible_starts(
    weights: Sequence[float], speeds: Sequence[float], memory: Memory | None
) -> list[range]:
    """The first layers that each stage may have, if no stage takes longer than in some cut.

    The stages before it must be able to take what comes before, and those from it on the rest.
    """
    before = [0.0, *accumulate(weights)]
    stages, layers = len(speeds), len(weights)
    most = float("inf") if memory else slowest_in_proportion(before, speeds)
    found = []
    for stage in range(stages):
        least = before[-1] - most * sum(speeds[stage:])
        limit = most * sum(speeds[:stage])
        first = bisect_left(before, least - ROUNDING * before[-1], hi=layers)
        last = bisect_right(before, limit + ROUNDING * before[-1], hi=layers) - 1 if stage else 0
        found.append(range(max(first, stage), min(last, layers - stages + stage) + 1))
    return found


def slowest_in_proportion(before: Sequence[float], speeds: Sequence[float]) -> float:
    """The time of the slowest stage if each gets about its share, and at least one layer."""
    stages, layers = len(speeds), len(before) - 1
    ends, whole = [0], before[-1] / sum(speeds)
    for stage, speed in enumerate(accumulate(speeds[:-1]), start=1):
        near = bisect_left(before, whole * speed)
        ends.append(min(max(near, ends[-1] + 1), layers - stages + stage))
    pairs = zip(pairwise([*ends, layers]), speeds, strict=True)
    return max((before[b] - before[a]) / speed for (a, b), speed in pairs)


def longer(
    weights: Sequence[float], speed: float, stage: int, first: int, after: dict[int, Cut],
    memory: Memory | None,
) -> Cut | None:  # fmt: skip
    """The best cut of all weights from the first one on, into this stage and those after it."""
    found: Cut | None = None
    time = held = 0.0
    for layer in range(first, len(weights)):
        time += weights[layer] / speed
        held += memory.of(stage, layer) if memory else 0.0
        if memory and held > memory.limit * (1 + ROUNDING):
            break
        if found is not None and time > found[0] * (1 + ROUNDING):
            break  # every longer stage takes even longer
        if layer + 1 in after:
            slowest, squares, sizes = after[layer + 1]
            new = max(time, slowest), squares + time * time, (layer + 1 - first, *sizes)
            if found is None or is_better(new, found):
                found = new
    return found


def is_better(new: Cut, old: Cut) -> bool:
    """A faster slowest stage; of equally fast ones, more equal stages."""
    if abs(new[0] - old[0]) > ROUNDING * old[0]:
        return new[0] < old[0]
    return new[1] < old[1] * (1 - ROUNDING)
