"""Cut a list of weights into stages so that the heaviest stage is as light as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

ROUNDING = 1e-12  # sums differ in their last digits with the order of their terms
ROUNDS = 60  # of bisection, for the weight of the heaviest stage


@dataclass(frozen=True, slots=True)
class Memory:
    """What layers hold, in bytes, and the most that a stage may hold."""

    state: Sequence[float]  # of each layer: parameters, gradients, optimizer
    kept: Sequence[float]  # of each layer: activations of one microbatch
    live: Sequence[int]  # of each stage: the microbatches whose activations it holds at once
    limit: float

    def of(self, stage: int, layer: int) -> float:
        """What a layer takes in a stage."""
        return self.state[layer] + self.live[stage] * self.kept[layer]

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether every stage of a cut has room."""
        bounds = enumerate(pairwise([0, *accumulate(sizes)]))
        held = (sum(self.of(stage, one) for one in range(a, b)) for stage, (a, b) in bounds)
        return max(held) <= self.limit * (1 + ROUNDING)


def balanced(
    weights: Sequence[float], stages: int, memory: Memory | None = None
) -> tuple[int, ...] | None:
    """How many of the weights each stage gets, in order, at least one. None: no cut has room.

    Of the cuts whose heaviest stage is the lightest, it is one with stages as equal as possible.
    Of two equal ones, it has fewer in the first stages, which hold more microbatches.

    >>> balanced([1, 1, 1, 1, 1, 1, 1, 3.5], 3)
    (3, 4, 1)
    """
    low, high = max(weights), sum(weights) * (1 + ROUNDING)
    if filled(weights, stages, high, memory) is None:
        return None
    if filled(weights, stages, low, memory) is not None:
        high = low  # one layer is the heaviest stage
    for _ in range(ROUNDS if low < high else 0):
        middle = (low + high) / 2
        if filled(weights, stages, middle, memory) is None:
            low = middle
        else:
            high = middle
    return evened(weights, stages, high * (1 + ROUNDING), memory)


def filled(
    weights: Sequence[float], stages: int, limit: float, memory: Memory | None = None
) -> tuple[int, ...] | None:
    """Every stage gets as much as it can take, and leaves something for those after it.

    If this does not take everything, no cut does: a later stage never has less to take.
    """
    sizes: list[int] = []
    first = 0
    for stage in range(stages):
        last = len(weights) - (stages - stage - 1)  # the others need one each
        size = sum(1 for _ in prefixes(weights, stage, range(first, last), limit, memory))
        if not size:
            return None
        sizes.append(size)
        first += size
    return tuple(sizes) if first == len(weights) else None


def prefixes(
    weights: Sequence[float], stage: int, layers: range, limit: float, memory: Memory | None
) -> Iterator[float]:
    """The weight of the first layer, of the first two, and so on, as far as the stage has room."""
    weight = held = 0.0
    for layer in layers:
        weight += weights[layer]
        held += memory.of(stage, layer) if memory else 0.0
        if weight > limit or (memory and held > memory.limit * (1 + ROUNDING)):
            return
        yield weight


def evened(
    weights: Sequence[float], stages: int, limit: float, memory: Memory | None
) -> tuple[int, ...]:
    """Of all cuts within the limits, the one whose squares of weights add up to the least.

    Stages are added from the last to the first.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {len(weights): (0.0, ())}
    starts = possible_starts(weights, stages, limit, memory)
    for stage in reversed(range(stages)):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first in starts[stage]:
            found = prefixes(weights, stage, range(first, max(best)), limit, memory)
            for size, weight in enumerate(found, start=1):
                if first + size in best:
                    squares, sizes = best[first + size]
                    total = squares + weight * weight
                    if first not in longer or total < longer[first][0] * (1 - ROUNDING):
                        longer[first] = (total, (size, *sizes))
        best = longer
    return best[0][1]


def possible_starts(
    weights: Sequence[float], stages: int, limit: float, memory: Memory | None
) -> list[range]:
    """The first layers that each stage may have: between what full stages leave on both sides."""
    sizes = filled(weights, stages, limit, memory)
    assert sizes is not None
    latest = [0, *accumulate(sizes[:-1])]
    earliest = len(weights)
    found = []
    for stage in reversed(range(stages)):
        before = range(earliest - 1, stage - 1, -1)
        earliest -= sum(1 for _ in prefixes(weights, stage, before, limit, memory))
        found.append(range(min(earliest, latest[stage]), latest[stage] + 1))
    return found[::-1]


def smallest_limit(memory: Memory, stages: int) -> float:
    """The least memory for which there is a cut."""
    low, high = 0.0, sum(memory.state) + max(memory.live) * sum(memory.kept)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if filled([0.0] * len(memory.state), stages, 0.0, replace(memory, limit=middle)) is None:
            low = middle
        else:
            high = middle
    return high
