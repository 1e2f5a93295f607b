"""Which tensors have the batch first, on paper: models as sets of sizes that must be equal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from piper.capture.trace.arguments.batch_dimension import Shape, batch_dimension

B, T = 4, 4


def found(shapes: Sequence[Shape], *equal: set[int], fixed: Sequence[int] = ()) -> list[set[int]]:
    """The groups, if first sizes of `equal` inputs must be equal, and those of `fixed` ones T."""

    def runs(tried: Sequence[Shape]) -> bool:
        sizes = [{tried[k][0] for k in some} for some in equal]
        return all(len(one) == 1 for one in sizes) and all(tried[k][0] == T for k in fixed)

    return [set(group) for group in batch_dimension(shapes, runs, ()).groups]


@pytest.mark.parametrize(
    ("shapes", "equal", "fixed", "groups"),
    [
        ([(B, T), (B, T)], [{0, 1}], [], [{0, 1}]),
        ([(B, T), (T, T), (B,)], [{0, 2}], [1], [{0, 2}]),
        ([(T, T), (8, T), (8,)], [{1, 2}], [0], [{1, 2}]),
        ([(B, T), (), (B,)], [{0, 2}], [], [{0, 2}]),
        ([(B, T), (B, T), (B, T)], [{0, 2}], [], [{0, 2}, {1}]),
        ([(B, T)] * 4, [{0, 3}, {1, 2}], [], [{0, 3}, {1, 2}]),
        ([(B, T)] * 7, [{0, 1, 2, 3, 4, 5, 6}], [], [set(range(7))]),
        ([(B, T)] * 7, [{0, 1, 2, 3, 4}, {5, 6}], [], [set(range(5)), {5, 6}]),
        ([(B, T)] * 7, [{0, 1, 2, 3, 4, 5}], [6], [set(range(6))]),
        ([(B, T), (B, T)], [{0, 1}], [0, 1], []),
        ([(B, T)], [], [0], [{0}]),
    ],
)
def test_the_batch_is_what_may_change_together(
    shapes: list[Shape], equal: list[set[int]], fixed: list[int], groups: list[set[int]]
) -> None:
    assert found(shapes, *equal, fixed=fixed) == groups
