"""Weights that tp divides stay where they are, for other shapes and without gradients."""

from __future__ import annotations

import pytest
from divided_shapes import train
from pool import run_on


@pytest.mark.parametrize(
    ("words", "width", "tied"), [(100, 64, True), (400, 16, True), (400, 16, False)]
)
def test_any_shape_trains_and_is_evaluated(words: int, width: int, tied: bool) -> None:
    for far in run_on(2, train, words, width, tied):
        assert len(far) >= 8 and max(map(abs, far)) < 1e-9
