"""Cut weights into stages of different speed, so that the slowest stage takes the least time."""

from __future__ import annotations

from collections.abc import Sequence

from piper.ir.balance import ROUNDING, Memory

Cut = tuple[float, float, tuple[int, ...]]  # time of the slowest stage, sum of squares, sizes


def balanced_by_speed(
    weights: Sequence[float], speeds: Sequence[float], memory: Memory | None = None
) -> tuple[int, ...] | None:
    """How many of the weights each stage gets, in order, at least one. None: no cut has room.

    >>> balanced_by_speed([1.0] * 8, [3.0, 1.0])
    (6, 2)
    """
    best: dict[int, Cut] = {len(weights): (0.0, 0.0, ())}
    for stage in reversed(range(len(speeds))):
        firsts = range(stage, max(best, default=0))
        found = {
            first: longer(weights, speeds[stage], stage, first, best, memory) for first in firsts
        }
        best = {first: cut for first, cut in found.items() if cut is not None}
    return best[0][2] if 0 in best else None


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
