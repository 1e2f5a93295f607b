"""Models that compute the CTC loss themselves: its sizes say which tensors have the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, Strategy, rehearse, where

ROWS, FRAMES, WIDTH, SIGNS, LABELS = 8, 6, 5, 4, 2
SGD = partial(torch.optim.SGD, lr=0.1)
HALVES = Strategy([Place(where(), [0]), Split("MB", 2)])
REPLICAS = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)])
Loss = Callable[[Tensor, Tensor], Tensor]  # of log probabilities, and labels


def lengths(y: Tensor, size: int) -> Tensor:
    return torch.full((len(y),), size)


LOSSES: dict[str, tuple[Loss, Strategy]] = {
    "a mean": (lambda p, y: F.ctc_loss(p, y, lengths(y, FRAMES), lengths(y, LABELS)), HALVES),
    "lists": (lambda p, y: F.ctc_loss(p, y, [FRAMES] * len(y), [LABELS] * len(y)), REPLICAS),
    "over rows": (
        lambda p, y: (
            F.ctc_loss(
                p, y, lengths(y, FRAMES), y[:, 0] % 2 + 1, reduction="sum", zero_infinity=True
            )
            / len(y)
        ),
        REPLICAS,
    ),
}


class Speech(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.loss = nn.Linear(WIDTH, 6), nn.Linear(6, SIGNS), loss
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.first(x))).log_softmax(-1)
        return self.loss(scores.transpose(0, 1), y)


def data(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FRAMES, WIDTH, dtype=torch.float64, generator=draw)
    return x, torch.randint(1, SIGNS, (ROWS, LABELS), generator=draw)


@one_of(2)
@pytest.mark.parametrize("name", LOSSES)
def test_they_train_as_in_plain_pytorch(name: str) -> None:
    loss, strategy = LOSSES[name]
    model, batches = Speech(loss), [data(seed) for seed in range(3)]
    losses = plain_losses(SGD(model.parameters()), batches, model)

    found = rehearse(Speech(loss), None, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for one, parameter in model.named_parameters():
        torch.testing.assert_close(
            found.parameters[one], parameter.detach(), rtol=1e-10, atol=1e-12
        )
