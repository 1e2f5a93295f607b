"""What zero=2 and 3 choose by memory: reduce once and hold what was gathered, where that fits."""

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
from piper.plan.instructions import Gather, Reduce
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


def strategy(
    reduce: str | None, microbatches: int = 4, zero: int = 3, buffers: int | None = 2
) -> Strategy:
    more: dict[str, Any] = {"reduce": reduce, "gather_buffers": buffers}
    return Strategy(BUILDERS["1f1b"](pp=2, dp=2, zero=zero, microbatches=microbatches, **more))


def data() -> Batch:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, 16, 8, dtype=torch.float64, generator=generator)
    return Batch.of((draw(), draw()))


JOB = Job(Net(), functional.mse_loss, strategy(None), Options(optimizer=SGD, device="cpu"))


def job(
    reduce: str | None, gib: float | None, microbatches: int = 4, zero: int = 3,
    buffers: int | None = 2,
) -> Job:  # fmt: skip
    options = replace(JOB.options, memory_gib=gib)
    return replace(JOB.under(strategy(reduce, microbatches, zero, buffers)), options=options)


def peak(reduce: str | None, zero: int = 3, buffers: int | None = 2) -> float:
    one, memory = job(reduce, None, zero=zero, buffers=buffers), job(reduce, gib=1.0).memory
    assert memory is not None
    return fullest(memory.peaks(compiled(one)))[1] / GIB


def compiled(one: Job) -> Any:
    return one.compile(data().part(0, 2), by_role=True)[1]


def reduces(one: Job) -> set[str | None]:
    return {d.reduce for d in compiled(one).program if isinstance(d, Replicate)}


def test_whole_gradients_are_kept_exactly_where_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    each, once = peak("each"), peak("once")
    assert each < once
    with caplog.at_level(logging.INFO, "piper"):
        assert reduces(job(None, gib=once)) == {"once"}
        assert "zero=3 reduces gradients once per step, since whole ones fit" in caplog.text
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
        assert "zero=2 reduces gradients once per step, since whole ones fit" in caplog.text
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


REGIONS = len(Net().layers)


def chosen(gib: float | None, microbatches: int = 4, **given: Any) -> tuple[str | None, int | None]:
    one = job(given.get("reduce"), gib, microbatches, buffers=given.get("buffers"))
    (found,) = {
        (d.reduce, d.gather_buffers) for d in compiled(one).program if isinstance(d, Replicate)
    }
    return found


WAYS = (("once", REGIONS), (None, REGIONS), ("once", None), (None, None))


def test_what_sends_least_is_chosen_of_what_fits() -> None:
    peaks = [peak(reduce or "each", buffers=buffers) for reduce, buffers in WAYS]
    sent = [sent_bytes(reduce or "each", buffers) for reduce, buffers in WAYS]

    assert sent[0] < min(sent[1:]) and max(sent[:-1]) < sent[-1]
    for limit in peaks:
        fitting = (way for way, needs in zip(WAYS, peaks, strict=True) if needs <= limit)
        assert chosen(limit) == next(fitting)


def test_what_is_held_and_sent_is_its_closed_form() -> None:
    """A device has 6 layers of 72 numbers. It gathers and reduces half of them from its peer."""
    layer, layers, parts = 72 * 8, 6, 4
    few, many = (
        compiled(job("each", None, buffers=buffers)).plans[0].buffers for buffers in (2, REGIONS)
    )

    assert few == (layer,) * 2 and many == (layer,) * layers
    assert sent_by_replicas("once", REGIONS) == 2 * layers * layer // 2
    assert sent_by_replicas("each", REGIONS) == (1 + parts) * layers * layer // 2


def sent_by_replicas(reduce: str, buffers: int) -> int:
    code = compiled(job(reduce, None, buffers=buffers)).plans[0].instructions
    return sum(one.sent for one in code if isinstance(one, Gather | Reduce))


def sent_bytes(reduce: str, buffers: int | None) -> int:
    plan = compiled(job(reduce, None, buffers=buffers)).plans[0]
    return sum(one.sent for one in plan.instructions)


def test_a_device_holds_what_was_gathered_also_with_one_microbatch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "piper"):
        assert chosen(1.0, microbatches=1) == (None, REGIONS)
        assert "zero=3 gathers parameters once per step, since whole ones fit" in caplog.text
        assert chosen(peak("each", buffers=None) + 1e-9) == (None, None)
        assert "zero=3 gathers parameters before each use: whole ones would not" in caplog.text


def test_with_automatic_remat_too_where_nothing_is_recomputed() -> None:
    auto = strategy(None, buffers=None) + piper.Remat(piper.where(), "auto")
    limits = 1.0, peak("each") - 1e-9
    large, small = (
        compiled(replace(JOB.under(auto), options=replace(JOB.options, memory_gib=gib))).program
        for gib in limits
    )

    assert {(d.reduce, d.gather_buffers) for d in large if isinstance(d, Replicate)} == {WAYS[0]}
    assert {(d.reduce, d.gather_buffers) for d in small if isinstance(d, Replicate)} == {WAYS[3]}
    assert not any(isinstance(d, piper.Remat) for d in large)
    assert any(isinstance(d, piper.Remat) for d in small)


def test_what_a_strategy_says_of_buffers_stays() -> None:
    assert chosen(1.0, buffers=2) == ("once", 2)
    assert chosen(1.0, reduce="each") == ("each", REGIONS)
    assert chosen(None) == (None, None)


def test_what_is_held_trains_alike() -> None:
    few, all_held = (
        rehearsed(job(None, gib=gib, buffers=None), [data()] * 3) for gib in (None, 1.0)
    )

    torch.testing.assert_close(all_held.losses, few.losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(all_held.parameters, few.parameters, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero", [2, 3])
def test_both_choices_train_alike(zero: int) -> None:
    runs = [rehearsed(job(reduce, gib=gib, zero=zero), [data()] * 3) for reduce, gib in
            [("each", None), (None, 1.0), (None, None)]]  # fmt: skip

    for found in runs[1:]:
        torch.testing.assert_close(found.losses, runs[0].losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.parameters, runs[0].parameters, rtol=1e-12, atol=1e-12)


REPLICAS = (piper.Place(piper.where(), [0, 1]), piper.Split("MB", 4))


def replicas(gib: float | None) -> Job:
    alone = Strategy([*REPLICAS, Replicate(piper.where(), [0, 1], zero=3)])
    return replace(JOB.under(alone), options=replace(JOB.options, memory_gib=gib))


def test_replicas_without_a_pipeline_hold_what_does_not_raise_the_peak(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "piper"):
        found = compiled(replicas(1.0)).program

    (kept,) = (one for one in found if isinstance(one, Replicate))
    assert (kept.reduce, kept.gather_buffers) == ("once", None)
    assert "zero=3 holds gathered parameters as long as that does not raise the peak" in caplog.text
    few, some, every = (
        rehearsed(replace(JOB.under(Strategy([*REPLICAS, one])), options=JOB.options), [data()] * 3)
        for one in (replace(kept, gather_buffers=2), kept, replace(kept, gather_buffers=REGIONS))
    )
    for other in (some, every):
        torch.testing.assert_close(other.losses, few.losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other.parameters, few.parameters, rtol=1e-12, atol=1e-12)
