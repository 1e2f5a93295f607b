"""Stages are cut for the machine that is known: measured, by a data sheet, or one CPU core."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import piper
from piper import Strategy, rehearse
from piper.costs import Costs
from piper.costs.devices import DEVICES, costs_of_device
from piper.costs.links import NETWORKS
from piper.errors import StrategyError
from piper.job import device_costs
from piper.job.batch.batch import Batch
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.pricing import price
from piper.job.compile.stage_weights import stage_lines, stage_table
from piper.job.job import Job
from piper.job.options import Options
from piper.strategies import one_f_one_b

LAYERS, WIDTH = 6, 1024
PIPELINE = one_f_one_b(pp=2, microbatches=2)


class Mixed(nn.Module):
    """Layers of a large product each, then layers of many small operators: one core works longest
    on the first, a GPU waits longest for the launches of the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // 2))
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS // 2))

    def forward(self, x: Tensor) -> Tensor:
        for product in self.products:
            with piper.annotate("L"):
                x = x + product(x)
        for scale in self.scales:
            with piper.annotate("L"):
                for _ in range(8):
                    x = torch.tanh(x * scale)
        return x


@cache
def job() -> Job:
    one = Strategy([piper.Place(piper.where(), [0])])
    return Job(Mixed(), mse_loss, one, Options(device="cpu"))


@cache
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def compiled(costs: Costs | str | None = None, strategy: Strategy = PIPELINE) -> Compiled:
    known = replace(job(), options=Options(device="cpu", costs=costs), strategy=strategy, cut=[])
    return known.compile(Batch.of(batch()))[1]


def cut(found: Compiled) -> tuple[int, ...]:
    stage = found.program[0]
    assert isinstance(stage, piper.Stage)
    return tuple(stage.stages)  # type: ignore[arg-type]


def fastest(costs: Costs) -> float:
    """A step of the best cut into two, of all cuts."""
    model = replace(job(), strategy=PIPELINE, cut=[]).capture(Batch.of(batch())).model
    by_hand = (one_f_one_b(pp=2, microbatches=2, stages=[k, LAYERS - k]) for k in range(1, LAYERS))
    made = (compile_strategy(model, one.directives, costs=costs) for one in by_hand)
    return min(price(one, costs).seconds for one in made)


def test_a_data_sheet_cuts_elsewhere_than_a_core() -> None:
    core, gpu = compiled(), compiled("h200")
    sheet = costs_of_device(DEVICES["h200"], gpu.dag.model, NETWORKS["h200"])

    assert cut(core) != cut(gpu)
    assert gpu.costs == sheet
    roomy = one_f_one_b(pp=2, microbatches=2, memory_gib=1.0)  # any cut fits
    for costs in (None, "h200"):
        found = compiled(costs, roomy)
        assert price(found).seconds == pytest.approx(fastest(found.costs))
    assert price(gpu, sheet).seconds < price(core, sheet).seconds


def test_the_gpu_of_the_process_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_costs.kind_of(torch.device("cuda")) == "h200"

    monkeypatch.setattr(device_costs, "kind_of", lambda device: "h200")

    assert compiled() == compiled("h200")
    assert compiled(Costs()).costs == Costs()  # what is given counts


def test_reports_say_for_what_machine_it_was_cut() -> None:
    core, gpu, given = compiled(), compiled("h200"), compiled(Costs(flops=1e12))
    words = ("estimates for one CPU core per device", "the data sheet of h200")

    for found, by in zip((core, gpu, given), (*words, "the costs that you gave"), strict=True):
        assert stage_table(found).splitlines()[-1].startswith(f"time: by {by}; ")
        (line,) = stage_lines(found)
        assert line.endswith(f", by {by}")


@pytest.mark.soak
def test_training_is_the_same_wherever_it_was_cut() -> None:
    batches = [batch(), tuple(-one for one in batch())]

    runs = [rehearse(Mixed(), mse_loss, PIPELINE, batches, costs=c) for c in (None, "h200")]

    for one, other in pairwise(runs):
        assert one.losses == other.losses
        for name, tensor in one.parameters.items():
            assert torch.equal(tensor, other.parameters[name])


def test_a_data_sheet_survives_json_and_nothing_else_names_one() -> None:
    costs = Costs(kind="h200")

    assert Costs.from_json(costs.to_json()) == costs
    with pytest.raises(StrategyError, match="there is no file 'h2000'") as refused:
        compiled("h2000")
    assert "or one of h100, h200" in str(refused.value)
    with pytest.raises(StrategyError, match="kind=3"):
        Costs(kind=3)  # type: ignore[arg-type]


def test_several_kinds_are_named_with_their_devices() -> None:
    found = compiled("a100:0,h200:1")

    assert [one.kind for one in map(found.costs.on, (0, 1))] == ["a100", "h200"]
    assert (
        stage_table(found)
        .splitlines()[-1]
        .startswith("time: by the data sheet of a100 and the data sheet of h200; ")
    )
    assert price(found) == price(found, [found.costs.on(device) for device in (0, 1)])
    assert Costs.from_json(found.costs.to_json()) == found.costs
    with pytest.raises(StrategyError, match="the job has device 1, which is not listed"):
        compiled("a100:0,h200:2-3")
