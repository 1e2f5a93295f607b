"""Rows that meet in the whole batch only, or for rare values only: refused, or warned of."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import InputError
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1)
ROWS = 32
Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {  # each is a mean over rows for two of eight microbatches
    "the first rows": lambda o, y: F.mse_loss(o[:16], y[:16]),
    "at most so many": lambda o, y: F.mse_loss(o[: min(len(o), 16)], y[: min(len(o), 16)]),
    "not the first ones": lambda o, y: F.mse_loss(o[-20:], y[-20:]),
    "rows behind others": lambda o, y: F.mse_loss(o, y) + (o[8:] - o[:-8]).square().sum() / len(o),
    "each eighth": lambda o, y: F.mse_loss(o, y) + o[::8].diff(dim=0).square().sum() / 10,
    "a part": lambda o, y: (o - y).square().mean(1).topk(math.ceil(len(o) / 8))[0].mean(),
    "all but one of so many": lambda o, y: F.mse_loss(
        o[: len(o) - len(o) // 10], y[: len(o) - len(o) // 10]
    ),
}
PARTS = {
    "microbatches": [Place(where(), [0]), Split("MB", 8)],
    "replicas": one_f_one_b(pp=1, dp=2, microbatches=4),
}


class Net(nn.Module):
    """`form` is of a value of each row, and of the batch."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.form = nn.Linear(4, 3).double(), form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.layer(x.nan_to_num(0.0, 1.0, -1.0)), x)


def data(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, width, generator=draw).double() for width in (4, 3))
    return x, y


@one_of(6)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_distant_rows_are_refused(name: str, parts: str) -> None:
    given = data(ROWS)
    with pytest.raises(InputError, match="one microbatch and one replica"):
        rehearse(Net(lambda h, _: h), LOSSES[name], PARTS[parts], [given], optimizer=SGD)


@one_of(15)
@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize("special", [None, math.nan, math.inf], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        lambda h, x: torch.where(x.isnan().any(), h * 2, h),
        lambda h, x: h * (1 + x.isnan().any().double()),
        lambda h, x: h * (1 + x.isinf().any().double()),
        lambda h, x: torch.where(x.isfinite().all(), h, torch.zeros_like(h)),
        lambda h, x: torch.where(h.abs() > 8000, h.median(), h),
        lambda h, x: h.masked_fill(h > 1e5, h.max()),
        lambda h, x: torch.where(h > h.amax() * 0.999, 0.0, h),
    ],
    ids=["nan", "factor", "infinite", "finite", "outliers", "filled", "largest"],
)
def test_models_that_ask_about_rare_values_are_warned_of(
    form: Callable[[Tensor, Tensor], Tensor],
    special: float | None,
    parts: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = data(6)
    if special is not None:
        x[0, 0] = special
    strategy = [Place(where(), [0]), Split("MB", parts)]
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Net(form), F.mse_loss, strategy, [(x, y)], optimizer=SGD)

    assert "rows of the batch meet" in caplog.text


@pytest.mark.parametrize(
    "form",
    [
        lambda h, x: torch.where(x.isnan().any(1, keepdim=True), h * 2, h),
        lambda h, x: torch.where(h > h.amax(1, keepdim=True) * 0.9, 0.0, h),
        lambda h, x: h.masked_fill(h > 1, 1.0) + torch.where(torch.ones(()) > 0, h, 0.0),
    ],
    ids=["nan", "largest", "constants"],
)
def test_what_each_row_decides_needs_no_warning(
    form: Callable[[Tensor, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Net(form), F.mse_loss, PARTS["microbatches"], [data(ROWS)], optimizer=SGD)

    assert not caplog.messages
