"""`fill_diagonal_`: what is written has no gradient, and everything else keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn

from piper import Place, Split, Strategy, rehearse, where
from piper.capture.trace.replaced.diagonals import fill_diagonal

ROWS, LENGTH, WIDTH = 4, 3, 6
SGD = partial(torch.optim.SGD, lr=0.1)
Fill = Callable[[Tensor], Tensor]


def contrastive(h: Tensor) -> Tensor:
    """Rows are compared with each other."""
    flat = nn.functional.normalize(h.flatten(1), dim=-1)
    scores = (flat @ flat.T / 0.5).fill_diagonal_(-1e9)
    others = torch.ones(len(h), len(h), dtype=torch.bool).fill_diagonal_(False)
    return -(scores.log_softmax(1) * others).sum(1).mean()


def of_tokens(h: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH, dtype=h.dtype).fill_diagonal_(-5.0)
    return ((h @ h.mT + mask).softmax(-1) @ h).square().mean()


def each(h: Tensor) -> Tensor:
    """In a view, whose memory another result reads."""
    scores = h @ h.mT
    for k in range(len(scores)):
        scores[k].fill_diagonal_(0.5)
    return scores.exp().mean()


def wrapped(h: Tensor) -> Tensor:
    tall = h.reshape(-1, 2) * 2
    return (tall.fill_diagonal_(1.0, wrap=True) * h.reshape(-1, 2)).square().mean()


WHOLE: dict[str, Fill] = {"contrastive": contrastive, "wrapped": wrapped, "each": each}
APART: dict[str, Fill] = {"of tokens": of_tokens}


class Model(nn.Module):
    def __init__(self, loss: Fill) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.loss = nn.Linear(WIDTH, WIDTH), loss
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.first(x)))


def data(seed: int) -> tuple[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=draw),)


CASES = [*((one, 1) for one in WHOLE.values()), *((one, 2) for one in APART.values())]


@one_of(2)
@pytest.mark.parametrize(("loss", "parts"), CASES, ids=[*WHOLE, *APART])
def test_models_that_fill_diagonals_train_as_in_plain_pytorch(loss: Fill, parts: int) -> None:
    model, batches = Model(loss), [data(seed) for seed in range(3)]
    losses = plain_losses(SGD(model.parameters()), batches, model)
    strategy = Strategy([Place(where(), [0]), Split("MB", parts)])

    found = rehearse(Model(loss), None, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found.parameters[name], parameter.detach(), rtol=1e-10, atol=1e-12
        )


SIZES = [(3, 3), (2, 5), (5, 2), (7, 2), (8, 3), (4, 4, 4), (1, 4), (4, 1), (9, 1), (2, 2, 2, 2)]


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_diagonal_is_that_of_torch(size: tuple[int, ...], wrap: bool) -> None:
    expected = torch.zeros(size).fill_diagonal_(2.5, wrap=wrap)

    assert torch.equal(fill_diagonal(None, torch.zeros(size), 2.5, wrap), expected)
