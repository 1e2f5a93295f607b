"""Losses that write to a part of a tensor, as `labels[labels == pad] = -100` does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from loss_forms import difference, form_of
from torch import Tensor
from torch.nn import functional as F

from piper.capture.loss import LossForm

Loss = Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]
Write = Callable[[Tensor], None]


def masked(y: Tensor) -> None:
    y[y == 3] = -100


def rows_by_label(y: Tensor) -> None:
    y[y[:, 0] > 2] = -100


def last_column(y: Tensor) -> None:
    y[:, -1] = -100


def columns(y: Tensor) -> None:
    y[:, :2] = -100


def listed_columns(y: Tensor) -> None:
    y[:, [1, 3]] = -100


def shifted(y: Tensor) -> None:
    y[:, :-1] = y[:, 1:].clone()
    y[..., -1] = -100


def one_of_each(y: Tensor) -> None:
    y[torch.arange(len(y)), y[:, 0].clamp(0, 4)] = -100


def named_by_where(y: Tensor) -> None:
    y[torch.where(y == 3)] = -100


def named_by_nonzero(y: Tensor) -> None:
    rows, columns = (y == 3).nonzero(as_tuple=True)
    y[rows, columns] = -100


def named_rows(y: Tensor) -> None:
    y[(y[:, 0] > 2).nonzero().squeeze(1)] = -100


def through_another(y: Tensor) -> None:
    other = torch.empty_like(y)
    other.copy_(y)
    other[other == 3] = -100
    y.copy_(other)


WRITES: tuple[Write, ...] = (
    masked, rows_by_label, last_column, columns, listed_columns, shifted, one_of_each,
    named_by_where, named_by_nonzero, named_rows, through_another,
)  # fmt: skip
LABELS = {one.__name__: one for one in WRITES}


def of_labels(write: Write, o: dict[str, Tensor], w: dict[str, Tensor]) -> Tensor:
    y = w["labels"].clone()
    write(y)
    return F.cross_entropy(o["tokens"].flatten(0, 1), y.flatten())


def weighted(write: Write, o: dict[str, Tensor], w: dict[str, Tensor]) -> Tensor:
    """By weights that are written, and divided by their sum."""
    weights = torch.ones(w["labels"].shape, dtype=torch.float64)
    weights[w["labels"] == -100] = 0
    write(weights)
    each = F.cross_entropy(o["tokens"].mT, w["labels"], reduction="none")
    return (each * weights.clamp(min=0)).sum() / weights.clamp(min=0).sum()


def smooth(o: dict[str, Tensor], w: dict[str, Tensor]) -> Tensor:
    t = torch.full_like(o["x"], 0.1)
    t[torch.arange(len(t)), w["k"]] = 0.9
    t[..., 0] = 0
    return F.kl_div(o["x"].log_softmax(-1), t, reduction="batchmean")


def losses_written(o: dict[str, Tensor], w: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(o["tokens"].mT, w["labels"], reduction="none").clone()
    each[:, 0] *= 2
    each[:, 1:3] += each[:, 3:5]
    each[w["labels"] == 2] = 0
    return each.mean()


LOSSES: dict[str, Loss] = {
    **{f"labels, {name}": partial(of_labels, write) for name, write in LABELS.items()},
    **{f"weights, {n}": partial(weighted, LABELS[n]) for n in ("last_column", "columns")},
    "smoothed labels": smooth,
    "losses": losses_written,
}


@one_of(3)
@pytest.mark.parametrize("parts", [3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_writes_to_a_part_of_each_row_are_followed(name: str, parts: int) -> None:
    form = form_of(LOSSES[name], parts)
    assert form.kind == "mean"
    assert max(difference(LOSSES[name], form, seed, parts) for seed in range(3)) < 1e-12


def one_row(y: Tensor) -> None:
    y[2] = -100


def some_rows(y: Tensor) -> None:
    y[:3] = -100


def listed_rows(y: Tensor) -> None:
    y[[0, 2]] = -100


def numbered_rows(y: Tensor) -> None:
    y[torch.arange(len(y)) < 2] = -100


def every_other(y: Tensor) -> None:
    y[::2] = -100


def scattered_row(y: Tensor) -> None:
    y.copy_(y.select_scatter(torch.full(y.shape[1:], -100), 0, 2))


def scattered_rows(y: Tensor) -> None:
    y.copy_(y.slice_scatter(torch.full((3, y.shape[1]), -100), 0, 0, 3))


CHOSEN = (
    one_row,
    some_rows,
    listed_rows,
    numbered_rows,
    every_other,
    scattered_row,
    scattered_rows,
)


@pytest.mark.parametrize("write", CHOSEN)
def test_writes_to_chosen_rows_are_no_mean(write: Write) -> None:
    assert form_of(partial(of_labels, write)) == LossForm()
