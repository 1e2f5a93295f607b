"""Types that meet under a precision: the message names the buffers that keep their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper import Precision
from piper.errors import CaptureError

X, Y = torch.randn(4, 6, 8), torch.randn(4, 6, 8)


class Table(nn.Module):
    """As most people write positions."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.statistics, self.block = nn.BatchNorm1d(6, affine=False), block  # are not named
        self.register_buffer("positions", torch.randn(10, 8))

    def forward(self, x: Tensor) -> Any:
        return self.block(x + self.of(x))

    def of(self, x: Tensor) -> Any:
        return self.positions[: x.shape[1]]


class Made(Table):
    """The forward makes the table."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        del self.positions

    def of(self, x: Tensor) -> Any:
        return torch.linspace(0, 1, 8)


class Converted(Table):
    def of(self, x: Tensor) -> Any:
        return super().of(x).to(x.dtype)


def trainer(model: nn.Module, **options: Any) -> piper.Trainer:
    return piper.Trainer(model, functional.mse_loss, example=(X, Y), device="cpu", **options)


@pytest.mark.parametrize("block", [nn.Linear(8, 8), nn.Conv1d(6, 6, 1)], ids=["product", "conv"])
@pytest.mark.parametrize(
    ("kind", "buffers", "fix"),
    [(Table, "buffers (positions) and", "positions"), (Made, "buffers and", "table")],
)
def test_what_keeps_its_type_is_named(
    block: nn.Module, kind: type[Table], buffers: str, fix: str
) -> None:
    with pytest.raises(CaptureError) as error:
        trainer(kind(block), precision="bf16")

    assert str(error.value).partition(": ")[2] == (
        "bfloat16 meets another type here: under this precision, parameters and batches are "
        f"bfloat16, but {buffers} tensors that the forward makes keep their type, and so does what "
        f"they are added to\n  fix: convert them where they are used: self.{fix}.to(x.dtype)"
    )
    assert "test_type_refusals.py" in error.value.where or "torch" in error.value.where


def test_what_it_says_helps() -> None:
    made = trainer(Converted(nn.Linear(8, 8)), precision="bf16")

    assert made.step(X, Y).loss > 0
    made.close()


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_two_types_is_refused(training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(8, 8)).train(training)

    with pytest.raises(CaptureError, match="a batch norm has weights in bfloat16 and") as error:
        trainer(model, precision="bf16")

    assert 'Precision(compute="bfloat16", keep=[torch.nn.BatchNorm1d])' in str(error.value)
    made = trainer(model, precision=Precision(keep=(nn.BatchNorm1d,)))
    assert made.step(X, Y).loss > 0
    made.close()


def test_without_a_precision_the_error_is_another() -> None:
    with pytest.raises(CaptureError, match="give batches in the type of the model"):
        trainer(Converted(nn.Linear(8, 8, dtype=torch.bfloat16)))
