"""Types that meet under a precision: the message names the buffers that keep their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import one_of
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


@one_of(2)
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


@one_of(2)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_batches_are_converted_to_the_type_of_the_model(dtype: torch.dtype) -> None:
    with pytest.raises(CaptureError) as error:
        trainer(nn.Linear(8, 8).to(dtype))

    fix = f"as in x.to({dtype}), or write model.to(torch.float32)"
    assert str(error.value).endswith(f"fix: give batches in the type of the model, {fix}")
    assert type(error.value) is CaptureError  # the one that docs/errors.md has


def test_of_a_model_of_two_types_tensors_are_converted_where_they_meet() -> None:
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))

    with pytest.raises(CaptureError, match="fix: convert one where they meet, as in h.to"):
        trainer(mixed)


H = torch.bfloat16
OF_ONE_TYPE: dict[str, Callable[[Tensor], Tensor]] = {
    "mv": lambda x: torch.mv(x, torch.ones(8)),
    "addbmm": lambda x: torch.addbmm(torch.ones(8, 8), x[None].mT, x[None]),
    "index_add": lambda x: torch.zeros(4, 8).index_add(0, torch.arange(len(x)), x),
    "index_copy": lambda x: torch.zeros(4, 8).index_copy(0, torch.arange(len(x)), x),
    "index_put": lambda x: torch.zeros(4, 8).index_put((torch.arange(len(x)),), x),
    "linalg_cross": lambda x: torch.linalg.cross(x[:, :3], torch.ones(4, 3)),
    "grid_sampler": lambda x: nn.functional.grid_sample(
        x[None, None], torch.zeros(1, 2, 2, 2), align_corners=False
    ),
    "cross_entropy_loss": lambda x: nn.functional.cross_entropy(
        x, torch.arange(len(x)), weight=torch.ones(8)
    ),
}


class Used(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(8, 8, dtype=H), use

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.use(self.layer(x)).float().sum()


@one_of(2)
@pytest.mark.parametrize("name", OF_ONE_TYPE)
def test_operators_of_one_type_are_refused_before_the_first_step(name: str) -> None:
    x = torch.ones(4, 8, dtype=H)

    with pytest.raises(RuntimeError):
        Used(OF_ONE_TYPE[name])(x, x)
    with pytest.raises(CaptureError, match="tensors of one type") as error:
        piper.Trainer(Used(OF_ONE_TYPE[name]), None, None, example=(x, x), device="cpu")

    assert "test_type_refusals.py" in error.value.where
