"""Running statistics under several replicas: as DistributedDataParallel has them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import drawn, every
from norms import (
    ADAM,
    SGD,
    WIDTH,
    Normed,
    assert_state,
    data,
    plainly,
    resume_and_go_on,
    train_and_read,
)
from pool import run_on
from safetensors.torch import load_file
from shared_capture import using
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Replicate, Split, annotate, rehearse, where
from piper.capture import Captured, capture
from piper.directives import Strategy
from piper.errors import InputError, PassError
from piper.job.job import Job
from piper.job.numerics import compare
from piper.job.options import Options
from piper.strategies import BUILDERS, one_f_one_b

ROWS = 2  # of a microbatch
PIPELINES = {"1f1b": 2, "zbv": 1, "dualpipe": 2, "gpipe": 2, "interleaved-1f1b": 2}
SCHEDULES = [
    (name, pp, dp, zero) for name, pp in PIPELINES.items() for dp in (2, 3) for zero in range(4)
]


@cache
def captured(norm: str, stages: int) -> tuple[nn.Module, Captured]:
    model = Normed(norm, stages).double()
    return model, capture(model, functional.mse_loss, data(ROWS)[0])


def trains_as_replicas(norm: str, strategy: Strategy, replicas: int, parts: int) -> None:
    stages = sum(isinstance(one, Place) for one in strategy)
    batches = data(ROWS * parts * replicas)
    model, found = captured(norm, stages)
    reference = plainly(Normed(norm, stages).double(), batches, replicas, parts)

    with using(found):
        result = rehearse(model, functional.mse_loss, strategy, batches, optimizer=ADAM)

    torch.testing.assert_close(result.losses, tuple(reference.losses), rtol=1e-12, atol=0)
    assert_state(result.parameters, reference.state)


@drawn
@pytest.mark.parametrize(("name", "pp", "dp", "zero"), every(20, SCHEDULES))
def test_every_schedule_normalises_each_replica_by_itself(
    name: str, pp: int, dp: int, zero: int
) -> None:
    parts = 4 if pp > 1 else 2
    strategy = BUILDERS[name](pp=pp, microbatches=parts, dp=dp, zero=zero)
    replicas = 2 * dp if name == "dualpipe" else dp

    trains_as_replicas("batch norm", strategy, replicas, parts)


def test_every_kind_of_statistics_is_that_of_the_first_replica() -> None:
    """The first replica need not be on the first device."""
    strategy = Strategy([
        Place(where(PP=0), [3, 0]), Replicate(where(PP=0), [3, 0], zero=2),
        Place(where(PP=1), [1, 2]), Replicate(where(PP=1), [1, 2]), Split("MB", 2),
    ])  # fmt: skip

    trains_as_replicas("all", strategy, replicas=2, parts=2)


def test_processes_read_the_statistics_of_the_first_replica(tmp_path: Path) -> None:
    four = one_f_one_b(pp=2, microbatches=2, dp=2)
    whole = [Place(where(), [3, 1, 2, 0]), Replicate(where(), [0, 1, 2, 3], zero=1)]
    after = Strategy([*whole, Split("MB", 2)])
    batches, start = data(16, 6), Normed("all", 2).double()
    third = plainly(start, batches[:3], 2, 2, SGD)
    fourth = plainly(evaluated(third.model, batches[-1]), batches[3:4], 2, 2, SGD)
    fifth = plainly(fourth.model, batches[4:5], 2, 2, SGD)

    runs = run_on(4, train_and_read, four.to_json(), after.to_json(), str(tmp_path))

    assert_state(runs[0]["state"], third.state)
    x, y = batches[-1]
    output = copy.deepcopy(third.model).eval()(x)
    torch.testing.assert_close(runs[0]["output"], output.detach(), rtol=1e-11, atol=1e-13)
    loss = functional.mse_loss(output, y).item()
    assert [run["loss"] for run in runs] == [pytest.approx(loss, rel=1e-12)] * 4
    assert_state(load_file(tmp_path / "exported" / "model.safetensors"), fourth.state)
    for name, wanted in {"buffers": fourth, "moved": fifth}.items():
        for run in runs:
            held = {key: one.flatten() for key, one in wanted.state.items() if key in run[name]}
            assert held.keys() == run[name].keys() and held
            assert_state(run[name], held)

    resumed = run_on(
        2, resume_and_go_on, one_f_one_b(pp=2, microbatches=2).to_json(), str(tmp_path)
    )

    assert_state(resumed[0]["state"], plainly(fourth.model, batches[4:5], 1, 2, SGD).state)


def evaluated(model: nn.Module, batch: tuple[Tensor, Tensor]) -> nn.Module:
    """A copy that has evaluated and predicted the rows of the first of two replicas."""
    made, mine = copy.deepcopy(model).eval(), batch[0].chunk(2)[0]
    with torch.no_grad():
        made(mine)
        made(mine)
    return made.train()


def test_the_check_agrees_with_plain_replicas() -> None:
    """`piper check --numerics` trains plainly, too, with buffers for each replica."""
    strategy = Strategy([Place(where(), [1, 0]), Replicate(where(), [0, 1]), Split("MB", 2)])
    model, _ = captured("all", 2)
    job = Job(model, functional.mse_loss, strategy, Options(optimizer=ADAM, device="cpu"))
    example = job.example(data(4)[0])
    found, compiled = job.compile(example)

    result = compare(job, example, found, compiled, steps=2)

    assert result.agrees
    assert "layers.0.1.running_mean" in {one.name for one in result.parameters if one.is_buffer}


class Centred(nn.Module):
    """Its output depends on a buffer that it updates."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP", 0):
            x = self.norm(self.first(x))
            old = self.centre.clone()
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
            if self.kind == "new":
                return x - self.centre
            if self.kind == "old":
                return x - old
            if self.kind == "normed":
                return self.norm(x - old)
            return Scaled.apply(x, old)


class Scaled(torch.autograd.Function):
    """Only its gradient depends on a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 + ctx.saved_tensors[0]), None


TWO = [Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)]


@pytest.mark.parametrize("kind", ["new", "old", "normed", "gradient"])
def test_a_buffer_that_is_updated_and_computed_with_is_refused(kind: str) -> None:
    with pytest.raises(PassError) as refused:
        rehearse(Centred(kind).double(), functional.mse_loss, TWO, data(8))

    assert str(refused.value) == (
        "strategy: PP0 updates centre and computes with it, on devices [0, 1]: replicas would "
        "compute with different values\n"
        "  fix: place PP0 on one device: devices=[0], or compute with values that no forward "
        "updates"
    )


def test_synchronised_norms_are_batch_norms_for_one_replica() -> None:
    model, batches = synchronised(), data(8)
    strategy = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", 2)]

    result = rehearse(model, functional.mse_loss, strategy, batches, optimizer=ADAM)

    reference = plainly(Normed("batch norm", 2).double(), batches, 1, 2)
    assert_state(result.parameters, reference.state)


def test_synchronised_norms_of_several_replicas_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        rehearse(synchronised(), functional.mse_loss, TWO, data(8))

    assert str(refused.value) == (
        "model: layers.0.1 is a SyncBatchNorm, and statistics over 2 replicas are not supported\n"
        "  fix: use BatchNorm, which normalises each microbatch of each replica by itself, as "
        "DistributedDataParallel does; or GroupNorm or LayerNorm"
    )


def synchronised() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(Normed("batch norm", 2)).double()
