"""Layers of a model without annotations, under strategies of one stage that work by layers."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn

import piper
from piper.capture import Captured, capture
from piper.capture.marks.tags import has_tags
from piper.errors import CaptureError, Problem
from piper.ir.nodes import Collective, Kind
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.numerics import compare
from piper.job.options import Options

DIM = 6


class Blocks(nn.Module):
    """A stem, three equal blocks and a head; nothing has a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class Annotated(Blocks):
    """Its code names `annotate`, whether that runs or not."""

    def __init__(self, runs: bool) -> None:
        super().__init__()
        self.runs = runs

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            with piper.annotate("L") if self.runs else nullcontext():
                x = x + torch.tanh(block(x))
        return self.head(x)


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x))


def job(model: nn.Module, **given: Any) -> Job:
    strategy = piper.strategies.one_f_one_b(pp=1, microbatches=2, **given)
    return Job(model.double(), nn.functional.mse_loss, strategy, Options(device="cpu"))


def batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    return Batch.of(tuple(torch.randn(8, 4, generator=draw).double() for _ in range(2)))


@one_of(4)
@pytest.mark.parametrize(
    "given",
    [{"dp": 2, "zero": 3}, {"dp": 2, "zero": 1}, {"remat": True}, {"offload": "activations"}],
    ids=str,
)
def test_what_works_by_layers_finds_them_and_trains_as_plain_pytorch(given: Any) -> None:
    torch.manual_seed(0)
    made = job(Blocks(), **given)

    captured, compiled = made.compile(batch())
    found = compare(made, batch(), captured, compiled)

    assert len(captured.model.regions) == 3
    assert found.agrees, (found.steps, found.wrong)
    assert found.dtype == "float64"


def test_zero_3_gathers_layer_by_layer() -> None:
    _, compiled = job(Blocks(), dp=2, zero=3).compile(batch())

    messages = (one for one in compiled.dag.nodes.values() if isinstance(one, Collective))
    gathered = {one.messages for one in messages if one.kind is Kind.ALL_GATHER}
    assert len(gathered) == 3


def test_a_model_with_annotations_is_not_searched(monkeypatch) -> None:
    monkeypatch.setattr("piper.job.compile.layer_search.tag_unannotated", None)  # would fail

    captured, _ = job(Annotated(runs=True), remat=True).compile(batch())

    assert [dict(region.tags) for region in captured.model.regions] == [{"L": k} for k in range(3)]


def test_layers_are_found_though_annotations_do_not_run() -> None:
    torch.manual_seed(0)
    made = job(Annotated(runs=False), dp=2, zero=3)

    captured, compiled = made.compile(batch())

    assert len(captured.model.regions) == 3
    assert compare(made, batch(), captured, compiled).agrees


def test_layers_are_found_though_the_whole_cannot_be_captured(monkeypatch) -> None:
    def refusing(model: nn.Module, *given: Any) -> Captured:
        if not has_tags(model):
            raise CaptureError("capture", Problem("the whole is too much", "cut it"))
        return capture(model, *given)

    monkeypatch.setattr("piper.job.job.capture", refusing)
    captured, _ = job(Annotated(runs=False), dp=2, zero=3).compile(batch())

    assert len(captured.model.regions) == 3


def test_layers_that_cannot_be_captured_are_no_error(caplog, monkeypatch) -> None:
    def refusing(model: nn.Module, *given: Any) -> Captured:
        if has_tags(model):
            raise CaptureError("capture", Problem("a layer shares memory", "copy it"))
        return capture(model, *given)

    monkeypatch.setattr("piper.job.job.capture", refusing)
    with caplog.at_level(logging.INFO, "piper"):
        captured, _ = job(Blocks(), dp=2, zero=3).compile(batch())

    assert len(captured.model.regions) == 1
    assert "the model is captured as one region, as its layers could not be" in caplog.text


def test_replicas_alone_need_no_layers() -> None:
    assert len(job(Blocks(), dp=2).capture(batch()).model.regions) == 1


def test_a_model_without_layers_says_what_to_write(caplog) -> None:
    with caplog.at_level(logging.INFO, "piper"):
        job(NoBlocks(), dp=2, zero=3).compile(batch())

    (line,) = [line for line in caplog.messages if "works on" in line]
    assert line == (
        "zero=3 works on the whole model at once, which is one region: no layers were found; to "
        'work layer by layer, write `with piper.annotate("L"):` around each layer, or '
        "piper.tag(model, ...)"
    )
