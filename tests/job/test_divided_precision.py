"""Mixed precision of divided models, against a plain loop that keeps masters by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from dense_net import Net, batches, loss_fn
from mixed_precision import ADAMW, TIGHT, ByHand, by_hand
from torch import nn

from piper import Place, Precision, Strategy, strategies, where
from piper.capture.precision import LossScale
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal, rehearsed
from piper.plan.instructions import Redistribute, Reduce

PARTS, MAX_NORM = 4, 0.05
KEPT = Precision(
    compute="float32", master="float64", reduce="float64", output="float64",
    keep=("layers.*.before", "layers.*.up"),
)  # fmt: skip


def make() -> nn.Module:
    torch.manual_seed(1)
    return Net()


class Double(nn.Module):
    """A module that is kept, by hand."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.double()).to(x.dtype)


def with_kept_modules() -> nn.Module:
    model = make()
    for layer in model.layers:  # type: ignore[union-attr]
        layer.before, layer.up = Double(layer.before), Double(layer.up)  # type: ignore[union-attr]
    return model


@cache
def job(precision: Precision) -> Job:
    one = Strategy([Place(where(), [0])])
    options = Options(optimizer=ADAMW, max_norm=MAX_NORM, precision=precision)
    return Job(make(), loss_fn, one, options)


@cache
def expected(precision: Precision) -> ByHand:
    kept = tuple(f"layers.{k}.{name}" for k in (0, 1) for name in ("before", "up"))
    model = with_kept_modules() if precision.keep else make()
    types, inside = [precision] * len(batches()), kept if precision.keep else ()
    return by_hand(model, loss_fn, types, batches(), PARTS, MAX_NORM, inside)


def run(strategy: Strategy, precision: Precision) -> Rehearsal:
    return rehearsed(job(precision).under(strategy), [Batch.of(batch) for batch in batches()])


def agree(found: Rehearsal, wanted: ByHand) -> None:
    for parts, losses in zip(found.parts, wanted.losses, strict=True):
        assert dict(parts) == pytest.approx(losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(wanted.norms, rel=1e-6)
    for name, master in wanted.masters.items():
        mine = found.parameters[name.replace(".module", "")]
        assert mine.dtype == master.dtype
        torch.testing.assert_close(mine, master, rtol=1e-6, atol=1e-7)


STRATEGIES = {
    "weights": strategies.zb_h1(pp=2, microbatches=2, dp=2, tp=2, zero=1),
    "shards": strategies.one_f_one_b(pp=1, microbatches=2, dp=2, tp=2, zero=3),
    "alone": strategies.one_f_one_b(pp=1, microbatches=4, tp=2),
    "tokens": strategies.dualpipev(pp=1, microbatches=2, dp=2, cp=2, zero=2),
}


SOAKED = [pytest.param(name, marks=pytest.mark.soak) for name in ("weights", "alone", "tokens")]


@pytest.mark.parametrize("name", ["shards", *SOAKED])
def test_divided_models_train_as_the_loop(name: str) -> None:
    agree(run(STRATEGIES[name], TIGHT), expected(TIGHT))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["weights", "tokens"])
def test_modules_that_are_kept_are_divided_too(name: str) -> None:
    agree(run(STRATEGIES[name], KEPT), expected(KEPT))


@pytest.mark.soak
def test_a_loss_scale_cancels_out() -> None:
    """A power of two, so that nothing is rounded otherwise."""
    scaled = replace(TIGHT, loss_scale=LossScale(init=2.0**10))

    agree(run(STRATEGIES["alone"], scaled), expected(TIGHT))


def test_activations_travel_in_the_compute_type_and_gradients_in_theirs() -> None:
    _, compiled = job(TIGHT).under(STRATEGIES["alone"]).compile(Batch.of(batches()[0]))

    plan = compiled.plan(0).instructions

    moved = [one.shape for one in plan if isinstance(one, Redistribute)]
    reduced = [one.messages for one in plan if isinstance(one, Reduce)]
    assert {dtype for size, dtype in moved if len(size) > 1} == {"float32"}
    assert {dtype for messages in reduced for dtype, *_ in messages} == {"float64"}
