"""Losses that decide something by what all rows give: a microbatch would decide for itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn

from piper import Place, Split, rehearse, where
from piper.errors import InputError

ROWS, WIDTH = 8, 4
SGD = partial(torch.optim.SGD, lr=0.1)
SPLIT = [Place(where(), [0]), Split("MB", 4)]
Guard = Callable[[Tensor], Tensor]  # of the losses of rows

GUARDS: dict[str, Guard] = {
    "nan_to_num": lambda rows: torch.nan_to_num(rows.mean()),
    "nan_to_num of a sum": lambda rows: torch.nan_to_num(rows.sum() / len(rows), nan=1.0),
    "nan_to_num_": lambda rows: rows.mean().nan_to_num_(),
    "isfinite": lambda rows: torch.where(rows.mean().isfinite(), rows.mean(), 0.0),
    "isnan": lambda rows: torch.where(torch.isnan(rows.mean()), 0.0, rows.mean()),
    "isinf": lambda rows: rows.mean().masked_fill(rows.mean().isinf(), 0.0),
    "itself": lambda rows: torch.where(rows.mean() == rows.mean(), rows.mean(), 0.0),
    "below infinity": lambda rows: torch.where(rows.mean() < float("inf"), rows.mean(), 0.0),
    "too large": lambda rows: torch.where(rows.mean() < 1e4, rows.mean(), rows.mean() * 0),
    "clamp": lambda rows: rows.mean().clamp(max=1e4),
    "minimum": lambda rows: torch.minimum(rows.mean(), rows.new_tensor(1e4)),
    "min": lambda rows: torch.min(rows.mean(), rows.new_tensor(1e4)),
    "a factor": lambda rows: rows.mean() * (rows.mean() < 1e4),
    "any row": lambda rows: torch.where(rows.isnan().any(), 0.0, rows.mean()),
    "all rows": lambda rows: torch.where(rows.isfinite().all(), rows.mean(), 0.0),
    "no row": lambda rows: rows.mean().masked_fill(~rows.isfinite().all(), 0.0),
    "the largest": lambda rows: torch.where(rows.amax().isfinite(), rows.mean(), 0.0),
    "finite ones": lambda rows: rows[rows.isfinite()].mean(),
    "nanmean": lambda rows: rows.nanmean(),
    "counted": lambda rows: rows.nan_to_num().sum() / rows.isfinite().sum(),
    "two terms": lambda rows: rows.mean() + torch.nan_to_num(rows.square().mean()),
    "a pair": lambda rows: torch.stack([rows.mean(), 2 * rows.mean()]).nan_to_num().sum(),
}
APART: dict[str, Guard] = {
    "nan_to_num": lambda rows: torch.nan_to_num(rows).mean(),
    "isfinite": lambda rows: torch.where(rows.isfinite(), rows, 0.0).mean(),
    "clamp": lambda rows: rows.clamp(max=1e4).sum() / len(rows),
    "a constant": lambda rows: torch.where(torch.tensor(1.0) > 0, rows.mean(), 0.0),
    "a metric": lambda rows: (rows.mean().isnan(), rows.mean())[1],
}


def rows_of(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean(1)


class Own(nn.Module):
    def __init__(self, guard: Guard) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.guard = nn.Linear(WIDTH, WIDTH), guard
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.guard(rows_of(torch.tanh(self.layer(x)), labels))


def data(seed: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, ROWS, WIDTH, generator=draw, dtype=torch.float64))


BATCHES = [data(1), data(2)]


def trained(guard: Guard, own: bool, **options: object) -> tuple[float, ...]:
    if own:
        return rehearse(Own(guard), None, SPLIT, BATCHES, optimizer=SGD, **options).losses
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    loss = lambda output, labels: guard(rows_of(output, labels))  # noqa: E731
    return rehearse(model, loss, SPLIT, BATCHES, optimizer=SGD, **options).losses


@one_of(4)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", every(5, GUARDS))
def test_a_decision_by_all_rows_is_refused(name: str, own: bool) -> None:
    with pytest.raises(InputError, match="loss of each row|microbatch"):
        trained(GUARDS[name], own)


@one_of(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", every(4, APART))
def test_a_decision_for_each_row_trains(name: str, own: bool) -> None:
    model = Own(APART[name])
    right = plain_losses(SGD(model.parameters()), BATCHES, model)

    assert trained(APART[name], own) == pytest.approx(right, rel=1e-12)
