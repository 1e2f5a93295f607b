"""Memory as computed from the plan, as measured in a run, and in closed form: all the same."""

import pytest
from metered import captured, closed_form, measure
from pool import run_on

from piper.strategies import BUILDERS, one_f_one_b


@pytest.mark.parametrize("zero", range(4))
def test_peak_memory_of_a_pipeline_of_replicas_is_its_closed_form(zero: int) -> None:
    strategy = one_f_one_b(pp=2, microbatches=4, dp=2, zero=zero)

    found = run_on(4, measure, 2, 8, strategy.to_json())

    for device, ((measured, _), computed) in enumerate(zip(found, found[0][1], strict=True)):
        stage = device % 2
        closed = closed_form(captured(2, 8)[1], stage, 2, zero, alive=2 - stage)
        assert abs(computed.total / measured - 1) < 0.01
        assert abs(measured / closed - 1) < 0.05, (device, measured, closed, str(computed))


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_the_compiler_knows_the_memory_of_every_schedule(schedule: str) -> None:
    dp = 1 if schedule == "dualpipe" else 2
    strategy = BUILDERS[schedule](pp=2, microbatches=4, dp=dp, zero=2)
    stages = sum(type(directive).__name__ == "Place" for directive in strategy)

    found = run_on(2 * dp, measure, stages, 4, strategy.to_json())

    for (measured, _), computed in zip(found, found[0][1], strict=True):
        assert abs(computed.total / measured - 1) < 0.05, (measured, str(computed))


def test_memory_grows_with_the_batch_by_what_is_alive() -> None:
    """Two microbatches are in flight on the first of two stages."""
    text = one_f_one_b(pp=2, microbatches=4, dp=2, zero=3).to_json()
    small, large = (run_on(4, measure, 2, rows, text)[0][0] for rows in (8, 16))

    grown = [closed_form(captured(2, rows)[1], 0, 2, 3, alive=2) for rows in (8, 16)]

    assert abs((large - small) / (grown[1] - grown[0]) - 1) < 0.05
