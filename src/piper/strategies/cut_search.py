"""The best of several cuts into stages, by the clock of their schedule.

The slowest stage is not all that counts. Of two cuts with the same one, that of 1F1B which has its
heavy stages first is faster, because the others fill and drain faster; a rank with several stages
takes what these take together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from piper.ir.partition.balance import ROUNDING

Sizes = tuple[int, ...]
ROUNDS = 40  # of bisection
MOST_CUTS = 120  # that are tried
MOST_PASSES = 40_000  # of the schedule, in all that are tried
FEWEST_CUTS = 4
GAIN = 1e-3  # of the step: less is not worth another cut


def best_cut(
    first: Sizes,
    others: Sequence[Sizes],
    seconds: Callable[[Sizes], float],
    passes: int,
    has_room: Callable[[Sizes], bool],
) -> Sizes:
    """The fastest cut that is found from these on, moving one layer at a time.

    `first` stays unless another is clearly faster. `passes`: of the schedule, for one cut.
    """
    left = max(FEWEST_CUTS, min(MOST_CUTS, MOST_PASSES // max(1, passes)))
    known = {first: seconds(first)}
    best = first

    def is_better(sizes: Sizes) -> bool:
        nonlocal best, left
        if sizes in known or left == 0:
            return False
        left -= 1
        known[sizes] = seconds(sizes)
        if known[sizes] >= known[best] * (1 - GAIN) or not has_room(sizes):
            return False
        best = sizes
        return True

    for sizes in others:
        is_better(sizes)
    while any(map(is_better, neighbours(best))):
        pass
    return best


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """One layer fewer in a stage and one more in another: first in the next one, then farther on.

    >>> list(neighbours((2, 1, 1)))
    [(1, 2, 1), (1, 1, 2)]
    """
    stages = range(len(sizes))
    for distance in stages[1:]:
        for one in stages[:-distance]:
            for less, more in ((one, one + distance), (one + distance, one)):
                if sizes[less] > 1:
                    moved = [*sizes]
                    moved[less] -= 1
                    moved[more] += 1
                    yield tuple(moved)


def even_cut(layers: int, stages: int) -> Sizes:
    """
    >>> even_cut(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def falling_cut(weights: Sequence[float], speeds: Sequence[float], microbatches: int) -> Sizes:
    """Each stage as heavy as it may be if it begins after those before it have taken their turn.

    Stage s works for all microbatches, after one has passed all stages before it, and these end
    their backwards after it. So the step takes no less than one microbatch in the stages before it
    and all in it. The largest of these bounds is made as small as possible.

    >>> falling_cut([1.0] * 16, [1.0] * 4, 8)
    (5, 4, 4, 3)
    """
    low, high = 0.0, (microbatches + 1) * sum(weights) / min(speeds)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if sum(filled(weights, speeds, microbatches, middle)) < len(weights):
            low = middle
        else:
            high = middle
    return filled(weights, speeds, microbatches, high * (1 + ROUNDING))


def filled(
    weights: Sequence[float], speeds: Sequence[float], microbatches: int, limit: float
) -> Sizes:
    """As many layers as each stage can take within the limit, and at least one."""
    sizes, first, before = [], 0, 0.0
    sums = [0.0, *accumulate(weights)]
    for stage, speed in enumerate(speeds):
        end, last = first + 1, len(weights) - (len(speeds) - stage - 1)  # others need one each
        room = (limit - before) / microbatches * speed
        while end < last and sums[end + 1] - sums[first] <= room:
            end += 1
        if (sums[end] - sums[first]) > room:
            return ()
        before += (sums[end] - sums[first]) / speed
        sizes.append(end - first)
        first = end
    return tuple(sizes)
