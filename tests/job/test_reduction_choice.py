"""When zero=2 and 3 reduce gradients: once where whole ones fit, unless said otherwise."""

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
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.memory.memory_limit import fullest
from piper.job.options import Options
from piper.job.programs.rehearsal import rehearsed
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


def strategy(reduce: str | None, microbatches: int = 4, zero: int = 3) -> Strategy:
    more: dict[str, Any] = {"reduce": reduce} if reduce else {}
    return Strategy(BUILDERS["1f1b"](pp=2, dp=2, zero=zero, microbatches=microbatches, **more))


def data() -> Batch:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, 16, 8, dtype=torch.float64, generator=generator)
    return Batch.of((draw(), draw()))


JOB = Job(Net(), functional.mse_loss, strategy(None), Options(optimizer=SGD, device="cpu"))


def job(reduce: str | None, gib: float | None, microbatches: int = 4, zero: int = 3) -> Job:
    options = replace(JOB.options, memory_gib=gib)
    return replace(JOB.under(strategy(reduce, microbatches, zero)), options=options)


def peak(reduce: str | None, zero: int = 3) -> float:
    one = job(reduce, gib=1.0, zero=zero)
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


def levels(one: Job) -> set[int]:
    return {d.zero for d in compiled(one).program if isinstance(d, Replicate)}


def test_zero_2_is_zero_1_exactly_where_whole_gradients_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    each, once = peak("each", zero=2), peak(None, zero=1)
    assert each < once
    with caplog.at_level(logging.INFO, "piper"):
        assert levels(job(None, gib=once, zero=2)) == {1}
        assert "zero=2 reduces gradients once per step: whole ones fit" in caplog.text
        assert levels(job(None, gib=(each + once) / 2, zero=2)) == {2}
        assert "zero=2 reduces the gradients of each microbatch" in caplog.text


def test_what_a_strategy_says_stays() -> None:
    assert levels(job("each", gib=1.0, zero=2)) == {2}
    assert reduces(job("each", gib=1.0)) == {"each"}
    assert reduces(job("once", gib=1.0)) == {"once"}


def test_nothing_is_chosen_without_a_limit_or_with_one_microbatch() -> None:
    assert reduces(job(None, gib=None)) == {None}
    assert reduces(job(None, gib=1.0, microbatches=1)) == {None}
    assert levels(job(None, gib=None, zero=2)) == {2}
    assert levels(job(None, gib=1.0, microbatches=1, zero=2)) == {2}


@pytest.mark.parametrize("zero", [2, 3])
def test_both_choices_train_alike(zero: int) -> None:
    runs = [rehearsed(job(reduce, gib=gib, zero=zero), [data()] * 3) for reduce, gib in
            [("each", None), (None, 1.0), (None, None)]]  # fmt: skip

    for found in runs[1:]:
        torch.testing.assert_close(found.losses, runs[0].losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.parameters, runs[0].parameters, rtol=1e-12, atol=1e-12)
