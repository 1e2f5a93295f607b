"""Losses that divide a mask by its mean, as forecasts of traffic do: `mask /= mask.mean()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from trained_as_plain import assert_trains_as_plain

from piper import Strategy, rehearse
from piper.errors import InputError
from piper.strategies import gpipe

SGD = partial(torch.optim.SGD, lr=0.1)
LossFn = Callable[[Tensor, Tensor], Tensor]


def plain(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    return ((o - y).abs() * (mask / mask.mean())).mean()


def squares(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    mask /= mask.mean()
    return (mask * (o - y) ** 2).mean(-1).mean()


def without_nan(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    mask /= mask.mean()
    loss = (o - y).abs() * mask
    loss[loss != loss] = 0
    return loss.mean()


def filled(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    mask /= mask.mean()
    mask = mask.masked_fill(torch.isnan(mask), 0.0)
    return ((o - y).abs() * mask).mean()


def replaced(o: Tensor, y: Tensor, missing: float = 0.0) -> Tensor:
    mask = (y != missing).double()
    mask /= torch.mean(mask)
    mask = torch.where(torch.isnan(mask), torch.zeros_like(mask), mask)
    loss = (o - y).abs() * mask
    loss = torch.where(torch.isnan(loss), torch.zeros_like(loss), loss)
    return torch.mean(loss)


def weighted(o: Tensor, y: Tensor) -> Tensor:
    weights = y.abs() + 0.5
    return ((o - y) ** 2 * (weights / weights.mean())).mean()


RIGHT: list[LossFn] = [plain, squares, without_nan, filled, replaced, weighted]
ZEROS: list[LossFn] = [filled, replaced, weighted]  # where nothing counts


def summed(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    return ((o - y).abs() * (mask / mask.mean())).sum()


def beside_one(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    return ((o - y).abs() * (mask / mask.mean() + 1)).mean()


def ones(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    mask = mask / mask.mean()
    return ((o - y).abs() * torch.where(torch.isnan(mask), 1.0, mask)).mean()


def bent(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).double()
    return ((o - y).abs() * (mask / mask.mean()).sqrt()).mean()


class Net(nn.Module):
    def __init__(self, loss_fn: LossFn | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss_fn = nn.Linear(4, 3).double(), loss_fn

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        output: Tensor = self.layer(x)
        if self.loss_fn is None or labels is None:
            return output
        return self.loss_fn(output, labels)


def batches(empty: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Rows miss different numbers of labels; those of the last microbatch may miss all."""
    draw, found = torch.Generator().manual_seed(1), []
    for missing in (0.2, 0.5, 0.8):
        x = torch.randn(8, 5, 4, generator=draw).double()
        y = torch.randn(8, 5, 3, generator=draw).double()
        y[torch.rand(y.shape, generator=draw) < missing] = 0.0
        y[6:] = 0.0 if empty else y[6:]
        found.append((x, y))
    return found


@pytest.mark.parametrize(
    "strategy", [gpipe(1, 3), gpipe(1, 2, dp=2, zero=2)], ids=["microbatches", "replicas"]
)
@pytest.mark.parametrize("loss_fn", RIGHT)
def test_they_train_as_in_plain_pytorch(loss_fn: LossFn, strategy: Strategy) -> None:
    assert_trains_as_plain(partial(Net, loss_fn), strategy, batches(), SGD)


@pytest.mark.parametrize("loss_fn", RIGHT)
def test_a_microbatch_in_which_nothing_counts_is_right_or_refused(loss_fn: LossFn) -> None:
    if loss_fn in ZEROS:
        assert_trains_as_plain(partial(Net, loss_fn), gpipe(1, 4), batches(empty=True), SGD)
        return
    with pytest.raises(InputError, match="weight 0"):
        rehearse(Net(loss_fn), None, gpipe(1, 4), batches(empty=True), optimizer=SGD)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("loss_fn", [summed, beside_one, ones, bent])
def test_what_is_no_mean_over_the_mask_is_refused_or_warned_of(
    loss_fn: LossFn, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if own and loss_fn is not summed:
        rehearse(Net(loss_fn), None, gpipe(1, 2), batches(), optimizer=SGD)
        assert "rows of the batch meet" in caplog.text
        return
    given = (Net(loss_fn), None) if own else (Net(None), loss_fn)
    with pytest.raises(InputError):
        rehearse(*given, gpipe(1, 2), batches(), optimizer=SGD)
