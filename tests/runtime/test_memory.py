"""Memory as computed from the plan, as measured in a run, and in closed form: all the same."""

from functools import cache

import pytest
from draws import every
from metered import closed_form, measure
from pool import run_on

from piper.ir.model import Model
from piper.plan.analyse.memory import Peak
from piper.strategies import BUILDERS, one_f_one_b


@cache
def measured(world: int, stages: int, rows: int, text: str) -> tuple[list[int], list[Peak], Model]:
    """By device, the bytes that were seen and those that were computed; the model."""
    found = run_on(world, measure, stages, rows, text)
    return [bytes for bytes, _, _ in found], found[0][1], found[0][2]


LEVELS = [(3, "once"), *((zero, None) for zero in range(4))]


@pytest.mark.parametrize(("zero", "reduce"), every(5, LEVELS))
def test_peak_memory_of_a_pipeline_of_replicas_is_its_closed_form(
    zero: int, reduce: str | None
) -> None:
    strategy = one_f_one_b(pp=2, microbatches=4, dp=2, zero=zero, reduce=reduce)

    found, peaks, model = measured(4, 2, 8, strategy.to_json())

    for device, (seen, computed) in enumerate(zip(found, peaks, strict=True)):
        stage = device % 2
        closed = closed_form(model, stage, 2, zero, alive=2 - stage, once=reduce == "once")
        assert abs(computed.total / seen - 1) < 0.01
        assert abs(seen / closed - 1) < 0.05, (device, seen, closed, str(computed))


@pytest.mark.parametrize("schedule", every(2, ["zb-h1", "dualpipe"]))
def test_the_compiler_knows_the_memory_of_every_schedule(schedule: str) -> None:
    dp = 1 if schedule == "dualpipe" else 2
    strategy = BUILDERS[schedule](pp=2, microbatches=4, dp=dp, zero=2)
    stages = sum(type(directive).__name__ == "Place" for directive in strategy)

    found, peaks, _ = measured(2 * dp, stages, 8, strategy.to_json())

    for seen, computed in zip(found, peaks, strict=True):
        assert abs(computed.total / seen - 1) < 0.05, (seen, str(computed))


@pytest.mark.soak
def test_memory_grows_with_the_batch_by_what_is_alive() -> None:
    """Two microbatches are in flight on the first of two stages."""
    text = one_f_one_b(pp=2, microbatches=4, dp=2, zero=3, reduce="once").to_json()
    runs = [measured(4, 2, rows, text) for rows in (8, 16)]  # the first one is that of above

    (small, large) = (found[0] for found, _, _ in runs)
    grown = [closed_form(model, 0, 2, 3, alive=2, once=True) for _, _, model in runs]

    assert abs((large - small) / (grown[1] - grown[0]) - 1) < 0.05
