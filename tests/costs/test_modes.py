"""The same work in every mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper.costs.estimate import Rates, Work
from piper.costs.modes import Mode
from piper.names import F

GPU = Rates(flops=1e12, memory=1e12, start=1e-6, launch=1e-5, ahead=True)
LARGE = Work(1e12, 0.0, 5e11, 10, 2e11, 4)
SMALL = Work(1e6, 0.0, 1e6, 10, 1e6, 4)


@pytest.mark.parametrize(
    ("mode", "large", "small"),
    [
        (Mode.EAGER, 1.5 + 1e-5, 1e-4),
        (Mode.COMPILED, 1.2 + 4e-6, 4e-5),
        (Mode.GRAPHS, 1.5 + 1e-5, 2e-6 + 1e-5),
        (Mode.COMPILED_GRAPHS, 1.2 + 4e-6, 2e-6 + 4e-6),
    ],
)
def test_compilers_fuse_and_graphs_need_no_launches(mode: Mode, large: float, small: float) -> None:
    assert GPU.estimate(LARGE, F, mode) == pytest.approx(large)
    assert GPU.estimate(SMALL, F, mode) == pytest.approx(small)


def test_work_that_was_counted_before_compilers_were_is_that_of_eager_operators() -> None:
    old = Work(1e12, 0.0, 5e11, 10)

    assert GPU.estimate(old, F, Mode.COMPILED) == GPU.estimate(old, F, Mode.EAGER)


def test_an_operator_of_a_compiler_takes_longer_to_start() -> None:
    slower = replace(GPU, fused=1.5)

    assert slower.estimate(SMALL, F, Mode.COMPILED) == pytest.approx(1.5 * 4e-5)
    assert slower.estimate(SMALL, F, Mode.COMPILED_GRAPHS) == pytest.approx(2e-6 + 1.5 * 4e-6)
    assert slower.estimate(SMALL, F, Mode.EAGER) == GPU.estimate(SMALL, F, Mode.EAGER)
