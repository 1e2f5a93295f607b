"""What a user says of the loss that a model computes itself is compared with what it does."""

from __future__ import annotations

import logging
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
Loss = Callable[[Tensor, Tensor], Tensor]  # of the errors of rows, and a weight

NEITHER: dict[str, Loss] = {
    "a sum and a mean": lambda e, w: e.sum() + e.mean(),
    "a mean and a small sum": lambda e, w: e.mean() + 0.01 * e.square().sum(),
    "a sum and a regulariser": lambda e, w: e.sum() + w.square().sum(),
    "means of rows, and a sum": lambda e, w: e.sum(1).mean() + e.sum(),
    "a sum times a mean": lambda e, w: e.sum() * e.mean(),
    "a norm": lambda e, w: e.norm() + e.mean(),
    "a sum in a logarithm's place": lambda e, w: e.mean() + e.sum().sqrt(),
    "a difference": lambda e, w: e.mean() - 0.5 * e.sum(),
}
COMPARED: dict[str, Loss] = {  # as in a loop that accumulates gradients, which the user asks for
    "a root": lambda e, w: e.mean().sqrt(),
    "a product": lambda e, w: e.mean() * (1 + e.square().mean()),
    "the largest": lambda e, w: e.mean() + e.amax(),
    "all rows in a logarithm": lambda e, w: e.mean(1).logsumexp(0),
    "a contrast": lambda e, w: (e @ e.t()).log_softmax(1).diagonal().mean(),
}


class Own(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(WIDTH, WIDTH), loss
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss((torch.tanh(self.layer(x)) - labels).square(), self.layer.weight)


def data(seed: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, ROWS, WIDTH, generator=draw, dtype=torch.float64))


@one_of(2)
@pytest.mark.parametrize("said", ["mean", "sum"])
@pytest.mark.parametrize("name", every(4, NEITHER))
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_not_what_the_user_says(
    name: str, said: str
) -> None:
    with pytest.raises(InputError, match=f'it is "{said}", but'):
        rehearse(Own(NEITHER[name]), None, SPLIT, [data(1)], optimizer=SGD, reduction=said)


@pytest.mark.parametrize("name", every(4, COMPARED))
def test_the_mean_of_microbatches_gets_a_warning_where_it_is_no_mean_of_rows(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    batches, model = [data(1), data(2)], Own(COMPARED[name])

    def accumulated(x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        return torch.stack([model(*part) for part in parts]).mean()

    right = plain_losses(SGD(model.parameters()), batches, accumulated)
    with caplog.at_level(logging.WARNING, "piper"):
        found = rehearse(Own(COMPARED[name]), None, SPLIT, batches, optimizer=SGD, reduction="mean")

    assert found.losses == pytest.approx(right, rel=1e-12)
    assert "one microbatch and one replica to make them equal" in caplog.text
