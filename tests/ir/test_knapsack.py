"""The best choice within a limit, against all choices."""

from itertools import product
from random import Random

import pytest
from draws import one_of

from piper.ir.partition.knapsack import STATES, Option, best_options


def brute_force(groups: list[list[Option]], limit: int) -> float | None:
    fits = [
        sum(worth for _, worth in chosen)
        for chosen in product(*groups)
        if sum(weight for weight, _ in chosen) <= limit
    ]
    return max(fits, default=None)


def worth(groups: list[list[Option]], chosen: list[int]) -> tuple[int, float]:
    taken = [group[position] for group, position in zip(groups, chosen, strict=True)]
    return sum(weight for weight, _ in taken), sum(one for _, one in taken)


def drawn(random: Random, heaviest: int) -> tuple[list[list[Option]], int]:
    groups = [
        [(random.randint(0, heaviest), random.random()) for _ in range(random.randint(1, 4))]
        for _ in range(random.randint(0, 5))
    ]
    return groups, random.randint(0, 1 + heaviest * len(groups))


@one_of(3)
@pytest.mark.parametrize("seed", range(200))
def test_small_weights_give_the_best_choice(seed: int) -> None:
    groups, limit = drawn(Random(seed), 9)

    chosen = best_options(groups, limit)

    if chosen is None:
        assert brute_force(groups, limit) is None
        return
    weight, found = worth(groups, chosen)
    assert weight <= limit
    assert found == pytest.approx(brute_force(groups, limit))


@one_of(3)
@pytest.mark.parametrize("seed", range(100))
def test_large_weights_are_as_good_as_a_slightly_smaller_limit(seed: int) -> None:
    groups, limit = drawn(Random(seed), 10**9)

    chosen = best_options(groups, limit)

    if chosen is None:
        assert brute_force(groups, limit) is None
        return
    weight, found = worth(groups, chosen)
    step = -(-limit // STATES)
    less = brute_force(groups, limit - step * (len(groups) + 1))
    assert weight <= limit
    assert less is None or found >= less - 1e-12
