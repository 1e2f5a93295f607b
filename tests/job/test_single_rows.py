"""An input may have a single row for all in one batch, and one for each row in the next."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, where

ROWS, WIDTH = 8, 4
Batch = tuple[Tensor, ...]


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * scale + shift
        return found


def batches(seed: int) -> list[Batch]:
    """Shifts and scales have one row or all, by chance; the batch itself may be smaller, too."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)

    def drawn(rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, dtype=torch.float64, generator=draw)

    sizes = [ROWS, ROWS, ROWS // 2, ROWS]
    return [
        (drawn(n), drawn(rng.choice([1, n])), drawn(rng.choice([1, n])), drawn(n)) for n in sizes
    ]


@pytest.mark.parametrize("seed", every(12, range(12)))
def test_rows_are_cut_where_they_are_rows(seed: int) -> None:
    plain, given = Shifted(), batches(seed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = plain_losses(optimizer, given, lambda *b: F.mse_loss(plain(*b[:-1]), b[-1]))

    found = trained(given)

    assert found == pytest.approx(losses, rel=1e-12)


@one_of(2)
@pytest.mark.parametrize("first", [1, ROWS], ids=["one row first", "all rows first"])
def test_both_in_turn(first: int) -> None:
    x, y = (torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    wide = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    given = [(x, wide[:n], wide, y) for n in (first, ROWS + 1 - first, first)]
    plain = Shifted()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = plain_losses(optimizer, given, lambda *b: F.mse_loss(plain(*b[:-1]), b[-1]))

    assert trained(given) == pytest.approx(losses, rel=1e-12)


def trained(given: list[Batch]) -> list[float]:
    strategy: list[Any] = [Place(where(), [0]), Split("MB", 2)]
    options = {"example": given[0], "device": "cpu", "optimizer": sgd}
    trainer = Trainer(Shifted(), F.mse_loss, strategy, **options)
    try:
        return [trainer.step(*one).loss for one in given]
    finally:
        trainer.close()


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)  # type: ignore[arg-type]
