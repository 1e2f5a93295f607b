"""Counts that a graph of one size shows wrongly: also in models that are too large for trials."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F
from trained_as_plain import assert_trains_as_plain

from piper import Place, Split, Strategy, rehearse, where
from piper.errors import InputError
from piper.job.loss import trial_size
from piper.strategies import gpipe

HALVES = [Place(where(), [0]), Split("MB", 2)]
COUNTS: dict[str, Callable[[Tensor], Tensor | int]] = {
    "all but the ignored": lambda y: y.numel() - (y == -100).sum(),
    "one more for each row": lambda y: (y != -100).sum() + len(y),
    "rows and tokens": lambda y: y.shape[0] * y.shape[1] - (y == -100).sum(),
    "a mean times elements": lambda y: (y != -100).double().mean() * y.numel(),
    "a mean of rows": lambda y: (y != -100).double().mean(0).sum() * len(y),
    "absolute values": lambda y: (
        F.l1_loss((y != -100).double(), torch.zeros(()).double().expand(y.shape)) * y.numel()
    ),
    "half of a mean": lambda y: 0.5 * len(y) * ((y != -100).double().mean() * y.shape[1] * 2),
    "times rows": lambda y: (y != -100).sum() * len(y),
}


REFUSED = ("times rows",)


class Net(nn.Module):
    def __init__(self, count: Callable[[Tensor], Tensor | int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.count = nn.Linear(4, 5).double(), count

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.count is None or labels is None:
            return self.layer(x)
        return summed(self.layer(x), labels) / self.count(labels)


def summed(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum")


def batch(ignored: bool) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, 4, generator=draw), torch.randint(5, (8, 6), generator=draw)
    y[5:7, :4] = -100 if ignored else 0
    return x.double(), y


@one_of(2)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_beside_a_number_of_rows_is_right_or_refused(
    name: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(trial_size, "WHOLE", 0.0)
        monkeypatch.setattr(trial_size, "MOST", 0.0)
    x, y = batch(ignored=True)
    wanted = Net(COUNTS[name])(x, y).item()
    if name in REFUSED:
        with pytest.raises(InputError):
            rehearse(Net(COUNTS[name]), None, HALVES, [(x, y)])
        return
    found = rehearse(Net(COUNTS[name]), None, HALVES, [(x, y)]).losses

    assert found == pytest.approx([wanted], rel=1e-12)


@one_of(2)
@pytest.mark.parametrize("strategy", [gpipe(1, 3), gpipe(1, 2, dp=2, zero=2)], ids=["mb", "dp"])
@pytest.mark.parametrize("name", [one for one in COUNTS if one not in REFUSED])
def test_it_trains_as_in_plain_pytorch(name: str, strategy: Strategy) -> None:
    """Microbatches of three and two rows, and replicas with other numbers of ignored labels."""
    batches = [batch(ignored=True), batch(ignored=False), batch(ignored=True)]

    assert_trains_as_plain(
        partial(Net, COUNTS[name]), strategy, batches, partial(torch.optim.SGD, lr=0.1)
    )


def test_a_count_that_is_not_followed_is_tried_with_ignored_labels() -> None:
    """The first batch has none, so that it would pass for a mean over rows."""

    def loss_fn(o: Tensor, y: Tensor) -> Tensor:
        return summed(o, y) / torch.bincount((y != -100).long().flatten(), minlength=2)[1]

    with pytest.raises(InputError):
        rehearse(Net(), loss_fn, HALVES, [batch(ignored=False), batch(ignored=True)])
