"""What a model takes, measured in one process, and what lies between processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import piper
import piper.job.programs.profiling as profiling
from piper.capture import annotate
from piper.costs import Costs
from piper.costs.measured import RegionKey
from piper.costs.modes import Mode
from piper.directives import Remat
from piper.ir.filters import where
from piper.job.batch.batch import Batch
from piper.job.compile.pricing import cost_notes, price
from piper.job.job import Job
from piper.job.options import Options
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.names import BI, BW, F, Phase
from piper.plan.instructions import Run
from piper.runtime.observe import step_timing
from piper.runtime.observe.measure import on_host
from piper.strategies import BUILDERS

pytestmark = pytest.mark.processes
PROCESSES = 2


@pytest.fixture(scope="module")
def inspected() -> tuple:
    tokens = torch.randint(32, (4, 6))
    model = Llama(LlamaConfig(vocab=32, dim=16, heads=2, layers=2), stages=2)
    strategy = BUILDERS["zb-h1"](pp=2, microbatches=4)
    options = Options(optimizer=partial(torch.optim.AdamW, lr=1e-3), device="cpu")
    job, example = Job(model, cross_entropy, strategy, options), Batch.of((tokens, tokens))
    return job, example, *job.compile(example)


def test_every_pass_of_every_region_has_a_figure(inspected, monkeypatch) -> None:
    job, example, captured, compiled = inspected
    monkeypatch.setattr(profiling, "machine", lambda: Costs(cores=2.0))
    before = {name: value.clone() for name, value in job.model.state_dict().items()}

    found = profiling.profile(job, example)

    codes = [region.code for region in captured.model.regions]
    assert set(found.figures) == {RegionKey(code, phase) for code in codes for phase in Phase}
    assert all(one.seconds > 0 and one.work for one in found.figures.values())
    assert found.add > 0 and found.update > 0 and found.square > 0 and found.each > 0
    assert found.cores == 2.0
    after = job.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert Costs.from_json(found.to_json()) == found
    step = price(compiled, found).seconds
    runs = sum(found.figures[RegionKey(c, phase)].seconds for c in codes for phase in (F, BI, BW))
    assert 4 * runs / 2 < step < 20 * runs


def test_recomputed_regions_have_figures_of_their_own(inspected, monkeypatch) -> None:
    job, example, captured, _ = inspected
    monkeypatch.setattr(profiling, "machine", Costs)
    recomputing = job.under(job.strategy + Remat(where(PP=0), keep="matmuls"))
    _, compiled = recomputing.compile(example)

    found = profiling.profile(recomputing, example)

    first, last = captured.model_with([("matmuls",)]).regions
    codes = [first.recomputed["matmuls",].code, last.code]
    assert {key.code for key in found.figures} == set(codes)
    assert all(one.seconds > 0 and one.work for one in found.figures.values())
    assert cost_notes(compiled, found)[0].startswith("links were not measured")


class Layered(torch.nn.Module):
    """Tagged by layers. Its stages belong to the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4 + k) for k in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with annotate("L"):
                x = torch.tanh(layer(x))
        return x.sum()


def test_stages_of_the_strategy_can_be_recomputed(monkeypatch) -> None:
    monkeypatch.setattr(profiling, "machine", Costs)
    strategy = BUILDERS["1f1b"](pp=2, microbatches=2, remat=[1])
    job = Job(Layered(), None, strategy, Options(device="cpu", reduction="sum"))
    example = Batch.of((torch.randn(4, 4),))

    found = profiling.profile(job, example)

    first, last = job.capture(example).model_with([()]).regions
    assert {key.code for key in found.figures} == {first.code, last.recomputed[()].code}


def test_costs_are_those_of_the_mode_in_which_regions_run(inspected) -> None:
    job, example, _, _ = inspected
    fused = replace(job, options=replace(job.options, compiled=True))

    assert fused.compile(example)[1].costs.mode is Mode.COMPILED


def test_on_a_gpu_every_instruction_is_timed_by_itself(inspected, monkeypatch) -> None:
    """Here is none: laps on the host stand in for those between events."""
    job, example, _, _ = inspected
    monkeypatch.setattr(step_timing, "on_gpu", on_host)
    monkeypatch.setattr(profiling, "stepwatch", step_timing.gpu_step)

    seen = profiling.measured(job, example, halves=True)

    steps = [seen[k :: len(seen) // profiling.ROUNDS] for k in range(len(seen) // profiling.ROUNDS)]
    assert all(len({one for one, _, _ in rows}) == 1 for rows in steps)
    runs = [seconds for one, seconds, _ in seen if isinstance(one, Run)]
    assert len(runs) == profiling.ROUNDS * 2 * 2 * 3  # microbatches, regions, passes
    assert all(seconds > 0 for seconds in runs)


def test_gpus_are_known_by_their_name(inspected, caplog, monkeypatch) -> None:
    model = inspected[2].model

    names = ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Radeon"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: names.pop(0))

    kinds = [profiling.kind_of(torch.device("cuda")) for _ in range(3)]
    known, _, other = (profiling.gpu_costs(kind, model) for kind in kinds)

    assert kinds == ["h200", "a100", None]
    assert profiling.kind_of(torch.device("cpu")) is None
    assert known.ahead and other.ahead
    assert known.link == 450e9
    assert "the links of this GPU are not known: give --network" in caplog.text


def test_links_and_cores_are_measured(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(piper.__file__).parents[1]))
    monkeypatch.setattr(profiling.os, "cpu_count", lambda: PROCESSES // 2)

    found = profiling.machine()

    assert 1e6 < found.link < 1e12
    assert 1e-6 < found.latency < 0.1
    assert 0 < found.post < 0.1 and 0 < found.wire < 1e-6
    assert 0.2 < found.cores < PROCESSES + 1


@pytest.mark.parametrize("given, wanted", [(None, 1), ("2", 2)])
def test_regions_have_the_threads_of_a_process_of_the_run(monkeypatch, given, wanted) -> None:
    """Of several, each has one: threads that share cores with others would wait for each other."""
    monkeypatch.delenv("OMP_NUM_THREADS") if given is None else monkeypatch.setenv(
        "OMP_NUM_THREADS", given
    )
    before = torch.get_num_threads()

    with profiling.threads_of_a_run(BUILDERS["1f1b"](pp=2, microbatches=4)):
        inside = torch.get_num_threads()
    with profiling.threads_of_a_run(BUILDERS["1f1b"](pp=1, microbatches=4)):
        alone = torch.get_num_threads()

    assert (inside, alone, torch.get_num_threads()) == (wanted, before, before)
