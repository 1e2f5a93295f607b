"""Rows that meet only where some are exceptional, which no row of the first batch is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F
from warned import warned

ROWS, TOKENS, WIDTH = 8, 6, 4
Mix = Callable[[Tensor], Tensor]


def wide(rows: Tensor) -> Tensor:
    return rows[:, None, None]


def large(x: Tensor) -> Tensor:
    return x.flatten(1).amax(1) > 4


def excess(x: Tensor) -> Tensor:
    """One number for each row, and 0 for those that are as in the first batch."""
    return (x.mean((1, 2)) - 4).relu()


def place(x: Tensor) -> Tensor:
    return torch.arange(len(x))


MEETING: dict[str, Mix] = {
    "a guard": lambda x: torch.where((x > 3).any(), 2 * x, x),
    "a scale": lambda x: x / torch.where(x.abs().max() > 5, x.abs().max(), 1.0),
    "cut at the median": lambda x: x.clamp(
        max=x.flatten().kthvalue(1 + x.numel() // 2)[0].clamp(3)
    ),
    "cut at the largest": lambda x: torch.minimum(x, 0.5 * x.amax().clamp(min=5)),
    "mean of these": lambda x: torch.where(wide(large(x)), x - x[large(x)].mean(0).nan_to_num(), x),
    "counted": lambda x: x * (1 + wide(large(x).cumsum(0))),
    "turned": lambda x: x.index_put((large(x).nonzero()[:, 0],), x[large(x)].flip(0)),
    "from the first ones": lambda x: x.masked_scatter(wide(large(x)).expand_as(x), x),
    "the next row": lambda x: x + x[(place(x) + large(x)).remainder(len(x))],
    "the row before": lambda x: x + x[(place(x) - large(x).long()).clamp(min=0)],
    "sums": lambda x: x - excess(x).sum(),
    "sums so far": lambda x: x - wide(excess(x).cumsum(0)),
    "sorted": lambda x: x - wide(excess(x).sort().values),
    "pairs": lambda x: x - wide((excess(x)[:, None] * excess(x)).sum(1)),
    "distances": lambda x: x + wide(torch.cdist(excess(x)[:, None], excess(x)[:, None]).sum(1)),
    "differences": lambda x: x + wide(F.pad(excess(x).diff(), (1, 0))),
    "neighbours": lambda x: x + wide(F.avg_pool1d(excess(x)[None], 3, 1, 1)[0]),
    "groups": lambda x: x - x.new_zeros(2).index_add(0, large(x).long(), excess(x)).sum(),
    "ranks": lambda x: x + wide(torch.searchsorted(excess(x).sort().values, excess(x))),
    "a histogram": lambda x: x * (1 + torch.histc(x.detach(), WIDTH, 3, 100)),
    "whole numbers": lambda x: x + (excess(x) / 2).long().max(),
}
APART: dict[str, Mix] = {
    "a guard of each row": lambda x: torch.where(wide(large(x)), 2 * x, x),
    "its own excess": lambda x: x - wide(excess(x)),
    "these alone": lambda x: x.index_put((large(x),), x[large(x)].flip(1)),
    "a scale of its own": lambda x: x / x.abs().amax((1, 2), keepdim=True).clamp(min=5),
}


class Net(nn.Module):
    def __init__(self, mix: Mix, last: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.mix, self.last = nn.Linear(WIDTH, WIDTH), mix, last
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.last(self.mix(x)))


def warnings_of(mix: Mix, last: Mix, caplog: pytest.LogCaptureFixture) -> list[str]:
    draw = torch.Generator().manual_seed(1)
    batch = torch.randn(2, ROWS, TOKENS, WIDTH, generator=draw, dtype=torch.float64).clamp(-1, 1)
    return warned(caplog, Net(mix, last), F.mse_loss, tuple(batch))


LASTS: dict[str, Mix] = {"plain": lambda x: x, "tanh": torch.tanh}
FORMS = {f"{a}, {b}": (m, f) for a, m in MEETING.items() for b, f in LASTS.items()}
CLEAN = {f"{a}, {b}": (m, f) for a, m in APART.items() for b, f in LASTS.items()}


@one_of(2)
@pytest.mark.parametrize(("mix", "last"), every(13, FORMS.values(), FORMS))
def test_exceptional_rows_that_meet_get_a_warning(
    mix: Mix, last: Mix, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = warnings_of(mix, last, caplog)

    assert "rows of the batch meet at test_exceptional_rows.py" in said


@pytest.mark.parametrize(("mix", "last"), every(7, CLEAN.values(), CLEAN))
def test_exceptional_rows_that_stay_apart_are_left_in_peace(
    mix: Mix, last: Mix, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings_of(mix, last, caplog)
