"""Every schedule gives the losses, gradients and parameters of plain PyTorch."""

import pytest
from draws import SOAK, drawn
from parity import assert_same, build, close, plain, train
from pool import run_on

from piper.errors import StrategyError
from piper.strategies import BUILDERS, from_csv

soak = pytest.mark.soak
V_SHAPED = ("zbv", "dualpipev")
HF = (("1f1b", 4), ("dualpipev", 2))  # of the same four stages
SCHEDULES = [name for name in BUILDERS if name != "dualpipe"]  # that is in test_replicate


def stages_of(schedule: str, ranks: int) -> int:
    return ranks * (2 if schedule in V_SHAPED or "interleaved" in schedule else 1)


def cases() -> list[object]:
    """Other schedules make nothing else of the same regions of an `hf` model, which also trains on
    processes in tests/models. By default, a schedule runs one other model, on two or on four."""
    found = []
    for k, schedule in enumerate(SCHEDULES):
        hf = [("hf", ranks, schedule) for name, ranks in HF if name == schedule]
        found += [(*case, soak) for case in hf]
        ways = [("llama", 2), ("skips", 4), ("skips", 2), ("llama", 4)]
        found += [(*way, schedule, () if j == k % 3 else soak) for j, way in enumerate(ways)]
    return [pytest.param(*case, marks=marks) for *case, marks in found]


@drawn
@pytest.mark.parametrize(("model", "ranks", "schedule"), cases())
def test_a_schedule_trains_as_plain_pytorch(model: str, ranks: int, schedule: str) -> None:
    if model == "hf":
        pytest.importorskip("transformers")
    stages, large = stages_of(schedule, ranks), SOAK and (model, ranks) == ("llama", 4)
    legal = 0
    for parts in (1, 4, 8) if SOAK else (4, 8):
        if (model == "hf" and (parts == 1 or legal)) or (parts == 8 and legal and not large):
            continue  # the same with more of it
        try:
            strategy = BUILDERS[schedule](pp=ranks, microbatches=parts)
        except StrategyError:
            continue
        legal += 1

        results = run_on(ranks, train, model, stages, parts, strategy.to_json())

        assert_same(results, plain(model, stages, parts, parts))
    assert legal


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_clipping_uses_the_norm_over_all_devices(schedule: str) -> None:
    stages = stages_of(schedule, ranks=2)
    strategy = BUILDERS[schedule](pp=2, microbatches=4)

    results = run_on(2, train, "llama", stages, 4, strategy.to_json(), 0.05)

    reference = plain("llama", stages, 4, 4, max_norm=0.05)
    assert min(reference.norms) > 0.05, "nothing was clipped"
    assert_same(results, reference)


def test_a_schedule_that_no_builder_has_trains_as_plain_pytorch() -> None:
    """Microbatches backwards, every other backward split, weight gradients last."""
    own = "0F3,0F2,0F1,0B3,0I2,0F0,0B1,0I0,0W2,0W0\n1F3,1B3,1F2,1I2,1F1,1W2,1B1,1F0,1I0,1W0\n"

    results = run_on(2, train, "llama", 2, 4, from_csv(own).to_json())

    assert_same(results, plain("llama", 2, 4, 4))


def test_the_whole_model_comes_back_as_a_state_dict() -> None:
    strategy = BUILDERS["1f1b"](pp=2, microbatches=4)
    model, _ = build("llama", 2)

    results = run_on(2, train, "llama", 2, 4, strategy.to_json())

    assert results[1].whole is None
    model.load_state_dict(results[0].whole)
    reference = plain("llama", 2, 4, 4).parameters
    for name, parameter in model.named_parameters():
        close(parameter.detach(), reference[name], name)
