"""Losses of a model in which rows get shares of one: their sum is no sum over rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.errors import InputError
from piper.strategies import gpipe

Reduce = Callable[[Tensor], Tensor]
SHARED: dict[str, Reduce] = {
    "hard rows count more": lambda loss: (loss * loss.detach().softmax(0)).sum(),
    "with gradients": lambda loss: (F.softmax(loss, dim=0) * loss).sum(),
    "from logarithms": lambda loss: (loss.log_softmax(0).exp() * loss).sum(),
    "by softmin": lambda loss: F.softmin(loss, 0) @ loss,
}


class Net(nn.Module):
    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.reduce = nn.Linear(5, 5).double(), reduce

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.reduce(F.cross_entropy(self.layer(x), labels, reduction="none"))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(6, 5, generator=draw).double()
    return x, torch.randint(5, (6,), generator=draw)


def train(reduce: Reduce, parts: int) -> tuple[float, ...]:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return rehearse(Net(reduce), None, gpipe(1, parts), [batch()], optimizer=sgd).losses


@pytest.mark.parametrize("name", SHARED)
def test_they_are_refused_where_the_batch_is_divided(name: str) -> None:
    with pytest.raises(InputError, match="cannot see how it reduces over rows"):
        train(SHARED[name], 3)

    assert train(SHARED[name], 1) == pytest.approx([Net(SHARED[name])(*batch()).item()])


def test_shares_of_classes_are_sums_over_rows() -> None:
    def reduce(loss: Tensor) -> Tensor:
        return (torch.stack([loss, 2 * loss], 1).softmax(1)[:, 0] * loss).sum()

    assert train(reduce, 3) == pytest.approx([Net(reduce)(*batch()).item()])
