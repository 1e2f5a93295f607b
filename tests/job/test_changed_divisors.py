"""A loop changes what a loss divides by: microbatches are weighed by what it divides by now."""

from __future__ import annotations

import pytest
from changed_divisors import CASES, on_two, plain, trained
from draws import every
from pool import run_on


@pytest.mark.parametrize("name", every(2, CASES, CASES))
def test_microbatches_are_weighed_by_what_the_loss_divides_by_now(name: str) -> None:
    assert trained(CASES[name]) == pytest.approx(plain(CASES[name]), rel=1e-10)


def test_processes_that_do_not_watch_the_loss_weigh_them_so_too() -> None:
    wanted = pytest.approx(plain(CASES["other weights"]), rel=1e-10)

    assert run_on(2, on_two) == [wanted, wanted]
