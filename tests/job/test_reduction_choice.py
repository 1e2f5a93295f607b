"""When zero=3 reduces gradients: once per step where whole gradients fit, unless said otherwise."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.directives import Replicate, Strategy
from piper.job.batch import Batch
from piper.job.job import Job
from piper.job.memory_limit import fullest
from piper.job.options import Options
from piper.job.rehearsal import rehearsed
from piper.strategies import BUILDERS

GIB = 2**30
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("L"):
                x = functional.silu(layer(x))
        return x


def strategy(reduce: str | None, microbatches: int = 4) -> Strategy:
    more: dict[str, Any] = {"reduce": reduce} if reduce else {}
    return Strategy(BUILDERS["1f1b"](pp=2, dp=2, zero=3, microbatches=microbatches, **more))


def data() -> Batch:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, 16, 8, dtype=torch.float64, generator=generator)
    return Batch.of((draw(), draw()))


JOB = Job(Net(), functional.mse_loss, strategy(None), Options(optimizer=SGD, device="cpu"))


def job(reduce: str | None, gib: float | None, microbatches: int = 4) -> Job:
    options = replace(JOB.options, memory_gib=gib)
    return replace(JOB.under(strategy(reduce, microbatches)), options=options)


def peak(reduce: str) -> float:
    one = job(reduce, gib=1.0)
    assert one.memory is not None
    return fullest(one.memory.peaks(compiled(one)))[1] / GIB


def compiled(one: Job) -> Any:
    return one.compile(data().part(0, 2), by_role=True)[1]


def reduces(one: Job) -> set[str | None]:
    return {d.reduce for d in compiled(one).program if isinstance(d, Replicate)}


def test_whole_gradients_are_kept_exactly_where_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    each, once = peak("each"), peak("once")
    assert each < once
    with caplog.at_level(logging.INFO, "piper"):
        assert reduces(job(None, gib=once)) == {"once"}
        assert "zero=3 reduces gradients once per step: whole ones fit" in caplog.text
        assert reduces(job(None, gib=(each + once) / 2)) == {None}
        assert "zero=3 reduces the gradients of each microbatch" in caplog.text


def test_what_a_strategy_says_stays() -> None:
    assert reduces(job("each", gib=1.0)) == {"each"}
    assert reduces(job("once", gib=1.0)) == {"once"}


def test_nothing_is_chosen_without_a_limit_or_with_one_microbatch() -> None:
    assert reduces(job(None, gib=None)) == {None}
    assert reduces(job(None, gib=1.0, microbatches=1)) == {None}


def test_both_choices_train_alike() -> None:
    runs = [rehearsed(job(reduce, gib=gib), [data()] * 3) for reduce, gib in
            [("each", None), (None, 1.0), (None, None)]]  # fmt: skip

    for found in runs[1:]:
        torch.testing.assert_close(found.losses, runs[0].losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.parameters, runs[0].parameters, rtol=1e-12, atol=1e-12)
