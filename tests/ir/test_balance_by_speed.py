"""Cuts for stages of different speed, held to all cuts that there are."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from draws import one_of

from piper.ir.partition.balance import Memory, balanced
from piper.ir.partition.balance_by_speed import balanced_by_speed


def slowest(weights: list[float], speeds: list[float], sizes: tuple[int, ...]) -> float:
    first, times = 0, []
    for size, speed in zip(sizes, speeds, strict=True):
        times.append(sum(weights[first : first + size]) / speed)
        first += size
    return max(times)


def fits(memory: Memory, sizes: tuple[int, ...]) -> bool:
    first = 0
    for stage, size in enumerate(sizes):
        if sum(memory.of(stage, k) for k in range(first, first + size)) > memory.limit:
            return False
        first += size
    return True


def every_cut(layers: int, stages: int) -> list[tuple[int, ...]]:
    ends = [(0, *some, layers) for some in combinations(range(1, layers), stages - 1)]
    return [tuple(b - a for a, b in zip(row, row[1:], strict=False)) for row in ends]


@one_of(3)
@pytest.mark.parametrize("seed", range(100))
def test_no_cut_has_a_faster_slowest_stage(seed: int) -> None:
    chance = Random(seed)
    layers = chance.randint(1, 8)
    stages = chance.randint(1, layers)
    weights = [chance.choice([1.0, 1.0, 2.0, 100.0]) for _ in range(layers)]
    speeds = [chance.choice([0.01, 1.0, 2.0, 1000.0]) for _ in range(stages)]
    memory = None
    if chance.random() < 0.5:
        live = [chance.randint(1, 3) for _ in range(stages)]
        memory = Memory([1.0] * layers, weights, live, chance.choice([5.0, 20.0, 400.0]))

    found = balanced_by_speed(weights, speeds, memory)

    possible = [cut for cut in every_cut(layers, stages) if memory is None or fits(memory, cut)]
    if not possible:
        assert found is None
        return
    assert found in possible
    best = min(slowest(weights, speeds, cut) for cut in possible)
    assert slowest(weights, speeds, found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_equal_speeds_are_as_good_as_no_speeds(seed: int) -> None:
    chance = Random(seed)
    weights = [chance.uniform(1, 3) for _ in range(chance.randint(4, 12))]
    equal = [2.0] * chance.randint(1, 4)

    by_speed, plain = balanced_by_speed(weights, equal), balanced(weights, len(equal))

    assert by_speed is not None and plain is not None
    times = (slowest(weights, equal, cut) for cut in (by_speed, plain))
    assert next(times) == pytest.approx(next(times))
