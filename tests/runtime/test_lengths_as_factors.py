"""A number of tokens as a factor of what a loss divides by, in replicas of different lengths."""

from __future__ import annotations

import pytest
from counted_lengths import COUNTS, plainly, train
from pool import run_on


@pytest.mark.parametrize("name", COUNTS)
def test_rows_of_different_lengths_have_their_own_factor(name: str) -> None:
    for losses in run_on(2, train, name):
        assert losses == pytest.approx(plainly(), rel=1e-10)
