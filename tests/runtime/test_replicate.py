"""Replicas under every schedule and every ZeRO level train as one process on the whole batch."""

import pytest
from draws import every
from pool import run_on
from replicas import assert_same, plain, train_all

from piper.directives import Strategy
from piper.errors import StrategyError
from piper.strategies import BUILDERS

LEVELS = (0, 1, 2, 3)
WAYS = (
    {"zero": 0, "bucket_mb": 1e-6},  # from one parameter in a message to everything in one
    {"zero": 1},
    {"zero": 2},
    {"zero": 3, "bucket_mb": 2e-4},
    {"zero": 3, "reduce": "once"},
)


def stages_of(strategy: Strategy) -> int:
    return sum(type(directive).__name__ == "Place" for directive in strategy)


def legal(schedule: str, pp: int, **options: object) -> Strategy:
    """With the fewest microbatches above one that the schedule allows."""
    for microbatches in (2, 4, 6, 8):
        try:
            return BUILDERS[schedule](pp=pp, microbatches=microbatches, **options)
        except StrategyError:
            continue
    raise AssertionError(f"{schedule} allows nothing")


# One stage is the same under every schedule; DualPipe mirrors an even number of stages.
OTHERS = [schedule for schedule in BUILDERS if schedule not in ("1f1b", "dualpipe")]
CASES = every(99, [("1f1b", 1, "uneven"), *((one, 2, "uneven") for one in BUILDERS)])
CASES += [pytest.param(one, 1, "uneven", marks=pytest.mark.soak) for one in OTHERS]
CASES += every(2, [("dualpipe", 2, "llama"), ("1f1b", 2, "llama")])


@pytest.mark.parametrize(("schedule", "pp", "model"), CASES)
def test_replicas_train_as_one_process_on_the_whole_batch(
    schedule: str, pp: int, model: str
) -> None:
    dp = 1 if schedule == "dualpipe" else 2
    strategies = [legal(schedule, pp, dp=dp, gather_buffers=1, **way) for way in WAYS]
    parts, stages = 2 * strategies[0].microbatches, stages_of(strategies[0])
    texts = [strategy.to_json() for strategy in strategies]

    runs = run_on(pp * dp, train_all, model, stages, parts, texts)

    for of_level in zip(*runs, strict=True):
        assert_same(of_level, plain(model, stages, parts, parts))
