"""Random numbers without rows are drawn once for all rows of a step, as plain training does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import draws, levels_of, one_of
from small_training import TWO
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, annotate, rehearse, where

Noise = Callable[[Tensor, Tensor], Tensor]  # of rows and a weight
ROWS, WIDTH = 8, 4  # sizes show nothing: microbatches of 2 and 4 rows divide the width
STRATEGIES = (
    [*TWO, Split("MB", 4)],
    [Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=3), Split("MB", 2)],
)
SHARED: dict[str, Noise] = {
    "dropped weights": lambda x, w: x @ F.dropout(w, 0.5),
    "noisy weights": lambda x, w: x @ (w + torch.randn_like(w)),
    "weights in place": lambda x, w: x @ (w + torch.empty_like(w).uniform_(-1, 1)),
    "bits of weights": lambda x, w: x @ torch.bernoulli(w.sigmoid().detach()),
    "one of the weights": lambda x, w: x + w[torch.multinomial(w.detach().abs()[0], 1)],
    "part of the weights": lambda x, w: x + F.dropout(w[:2], 0.5).sum(0),
    "channels of weights": lambda x, w: x @ F.dropout1d(w[None], 0.5)[0],
    "like one row": lambda x, w: x + torch.rand_like(x[0]),
    "of the size of one row": lambda x, w: x + x.new_empty(x.shape[1:]).normal_(),
    "a dropped constant": lambda x, w: x * F.dropout(torch.ones_like(x[0]), 0.5),
}
FOLLOWING: dict[str, Noise] = {
    "pairs of rows": lambda x, w: x + torch.rand(len(x) // 2, 1).repeat_interleave(2, 0),
    "rows and weights": lambda x, w: F.dropout(x[:, None] * w, 0.5).sum(1),
    "rows": lambda x, w: F.dropout(x, 0.5),
}
BOTH = SHARED | FOLLOWING


class Noisy(nn.Module):
    def __init__(self, *noises: Noise) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.noises = noises
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = torch.tanh(self.first(x))
        with annotate("PP"):
            return sum((noise(x, self.last.weight) for noise in self.noises), x)


def assert_independent_of_strategy(*noises: Noise) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [
        tuple(torch.randn(2, ROWS, WIDTH, generator=draw, dtype=torch.float64)) for _ in range(2)
    ]
    sgd = torch.optim.SGD
    alone = rehearse(Noisy(*noises), F.mse_loss, [Place(where(), [0])], batches, optimizer=sgd)
    for strategy in STRATEGIES:
        found = rehearse(Noisy(*noises), F.mse_loss, strategy, batches, optimizer=sgd)

        assert found.losses == pytest.approx(alone.losses, rel=1e-12)
        for name, tensor in found.parameters.items():
            torch.testing.assert_close(tensor, alone.parameters[name], rtol=1e-9, atol=1e-12)


@pytest.mark.soak
def test_every_strategy_draws_numbers_without_rows_once() -> None:
    assert_independent_of_strategy(*list(BOTH.values())[:: draws(3, 1)])


@pytest.mark.soak
@pytest.mark.parametrize("noise", BOTH.values(), ids=BOTH)
def test_every_strategy_draws_numbers_without_rows_once_for_one_kind(noise: Noise) -> None:
    assert_independent_of_strategy(noise)


EACH: dict[str, Noise] = {
    "one number": lambda x, w: torch.stack([row * torch.rand([]) for row in x]),
    "an element": lambda x, w: torch.stack([row * torch.rand(1) for row in x]),
    "as long as a row": lambda x, w: torch.stack([row + torch.randn(WIDTH) for row in x]),
    "beside dropped weights": lambda x, w: (
        torch.stack([row + torch.randn([]) for row in x]) + F.dropout(w, 0.5).sum(0) * 0
    ),
}


@one_of(2)
@pytest.mark.parametrize(("name", "parts"), levels_of(EACH, [2, ROWS], nth=2))
def test_numbers_that_a_loop_draws_for_each_row_differ_in_all_microbatches(
    name: str, parts: int
) -> None:
    rows = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    strategy = [Place(where(), [0]), Split("MB", parts)]

    found = rehearse(Noisy(EACH[name]), F.mse_loss, strategy, [(rows, rows)])

    assert len({*found.parts[0].values()}) == parts


def test_weights_that_are_dropped_beside_a_loop_are_the_same_for_all_rows() -> None:
    def noise(x: Tensor, w: Tensor) -> Tensor:
        return x @ F.dropout(w, 0.5) + 0 * torch.stack([row * torch.rand([]) for row in x])

    assert_independent_of_strategy(noise)
