"""Cut a list of weights into stages so that the heaviest stage is as light as possible."""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-12  # sums differ in their last digits with the order of their terms
ROUNDS = 60  # of bisection, for the weight of the heaviest stage


def balanced(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many consecutive weights each stage gets, at least one.

    >>> balanced([1, 1, 1, 1, 1, 1, 1, 3.5], 3)
    (4, 3, 1)
    """
    low, high = max(weights), sum(weights) * (1 + ROUNDING)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if len(filled(weights, stages, middle)) > stages:
            low = middle
        else:
            high = middle
    return filled(weights, stages, high)


def filled(weights: Sequence[float], stages: int, limit: float) -> tuple[int, ...]:
    """Fill one stage after the other up to a limit. At least one weight is left for each."""
    sizes: list[int] = []
    size, weight = 0, 0.0
    for k, one in enumerate(weights):
        rest = stages - len(sizes) - 1  # stages after this one
        if size and (weight + one > limit or len(weights) - k == rest):
            sizes.append(size)
            size, weight = 0, 0.0
        size, weight = size + 1, weight + one
    return (*sizes, size)
