"""Tables: integers of each column have a range of their own, and an Embedding of that size."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, rehearse, where
from piper.errors import InputError
from piper.job.inspection import Inspected, inspecting
from piper.job.numerics import compare

ROWS, WIDTH = 8, 4
SIZES = [(4, 7), (7, 4), (2, 3, 50)]
SGD = partial(torch.optim.SGD, lr=0.1)
PARTS = [Place(where(), [0]), Split("MB", 2)]


class Table(nn.Module):
    def __init__(self, sizes: tuple[int, ...], rows_meet: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in sizes)
        self.head, self.rows_meet = nn.Linear(WIDTH, 1), rows_meet
        self.double()

    def forward(self, categories: Tensor) -> Tensor:
        found = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        x = torch.stack(found).sum(0)
        if self.rows_meet:  # as between the rows of SAINT
            x = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return self.head(torch.tanh(x)).squeeze(-1)


class Lengths(nn.Module):
    """No number of a column may be larger than that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 1, dtype=torch.float64)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.table(pairs[:, 1] - pairs[:, 0]).squeeze(-1)


def batch(seed: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    columns = [torch.randint(size, (ROWS,), generator=draw) for size in sizes]
    columns[0][0], columns[-1][-1] = sizes[0] - 1, sizes[-1] - 1
    return torch.stack(columns, 1), torch.randn(ROWS, dtype=torch.float64, generator=draw)


def pairs() -> tuple[Tensor, Tensor]:
    first = torch.arange(ROWS) % 4
    return torch.stack([first, first + torch.arange(ROWS)], 1), torch.ones(ROWS).double()


@one_of(2)
@pytest.mark.parametrize("sizes", every(3, [(one,) for one in SIZES]))
@pytest.mark.parametrize("rows_meet", [False, True])
def test_the_trial_of_microbatches_stays_in_each_column(
    sizes: tuple[int, ...], rows_meet: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "piper")

    rehearse(Table(sizes, rows_meet), F.mse_loss, PARTS, [batch(1, sizes)], optimizer=SGD)

    assert "no trial" not in caplog.text
    assert ("rows of the batch meet" in caplog.text) is rows_meet


def agrees(model: nn.Module, example: tuple[Tensor, Tensor]) -> bool:
    with inspecting(), pytest.raises(Inspected) as seen:
        Trainer(model, F.mse_loss, PARTS, example=example, device="cpu", optimizer=SGD)
    found = seen.value
    return compare(found.job, found.example, found.captured, found.compiled, steps=2).agrees


@one_of(2)
@pytest.mark.parametrize("sizes", every(2, [(one,) for one in SIZES]))
def test_a_check_of_numerics_draws_what_each_column_takes(sizes: tuple[int, ...]) -> None:
    assert agrees(Table(sizes), batch(1, sizes))


def test_columns_that_belong_together_are_rows_of_the_example() -> None:
    assert agrees(Lengths(), pairs())


@pytest.mark.soak
def test_a_model_that_runs_on_no_data_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose kernels need a GPU: traced, and never run."""
    monkeypatch.setattr(Lengths, "forward", lambda self, x: self.table(x[:, 1] + 9).squeeze(-1))

    with pytest.raises(InputError, match=r"nor on its own rows: IndexError index out of range"):
        agrees(Lengths(), pairs())
