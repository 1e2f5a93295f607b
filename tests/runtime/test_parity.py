"""Every schedule gives the losses, gradients and parameters of plain PyTorch."""

import pytest
from parity import assert_same, plain, train
from pool import run_on

from piper.errors import StrategyError
from piper.strategies import BUILDERS

V_SHAPED = ("zbv", "dualpipev")
SCHEDULES = [name for name in BUILDERS if name != "dualpipe"]  # its replicas need Replicate


def stages_of(schedule: str, ranks: int) -> int:
    return ranks * (2 if schedule in V_SHAPED or "interleaved" in schedule else 1)


@pytest.mark.parametrize("model", ["llama", "skips", "hf"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_trains_as_plain_pytorch(model: str, ranks: int, schedule: str) -> None:
    if model == "hf":
        pytest.importorskip("transformers")
    stages = stages_of(schedule, ranks)
    legal = 0
    for parts in (1, 4, 8):
        try:
            strategy = BUILDERS[schedule](pp=ranks, microbatches=parts)
        except StrategyError:
            continue
        legal += 1

        results = run_on(ranks, train, model, stages, parts, strategy.to_json())

        assert_same(results, plain(model, stages, parts, parts))
    assert legal
