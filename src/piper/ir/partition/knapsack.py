"""Choose one option of each group: the most worth within a limit of weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

Option = tuple[int, float]  # weight, worth
Chosen: TypeAlias = tuple[Any, int] | None  # the choices before, and the last one
State = tuple[int, float, Chosen]  # weight and worth so far
STATES = 4096  # weights that are told apart


def best_options(groups: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The position of the chosen option in each group. None: even the lightest are too heavy.

    Dynamic programming over the weight. The choice is optimal if there is room for at most 4096
    units of weight above the lightest options. With more room, weights are rounded up to 4096ths of
    it. The limit still holds, and the choice is at least as good as the optimum for a limit that is
    smaller by 4096ths of the room, one for each group.

    >>> best_options([[(0, 0.0), (2, 3.0)], [(0, 0.0), (2, 2.0), (3, 4.0)]], 4)
    [1, 1]
    """
    lightest = [min(weight for weight, _ in group) for group in groups]
    room = limit - sum(lightest)
    if room < 0:
        return None
    step = max(1, -(-room // STATES))
    best: list[State] = [(0, 0.0, None)]
    for group, least in zip(groups, lightest, strict=True):
        extra = [(-(-(weight - least) // step), worth) for weight, worth in group]
        best = undominated(
            (used + weight, worth + more, (chosen, position))
            for used, worth, chosen in best
            for position, (weight, more) in enumerate(extra)
            if used + weight <= room // step
        )
    return unrolled(best[-1][2])


def undominated(states: Iterable[State]) -> list[State]:
    """Heavier states are kept only if they are worth more. Sorted by both."""
    found: list[State] = []
    for state in sorted(states, key=lambda one: (one[0], -one[1])):
        if not found or state[1] > found[-1][1]:
            found.append(state)
    return found


def unrolled(chosen: Chosen) -> list[int]:
    found: list[int] = []
    while chosen is not None:
        chosen, last = chosen
        found.append(last)
    return found[::-1]
