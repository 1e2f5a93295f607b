"""Losses that are zero up to rounding, such as those of policy gradients: gradients are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from trained_as_plain import assert_trains_as_plain

from piper import Place, Replicate, Split, Strategy, rehearse, where

ROWS, GROUP, LENGTH, WIDTH = 8, 4, 5, 3
SGD = partial(torch.optim.SGD, lr=0.1)
HALVES = Strategy([Place(where(), [0]), Split("MB", 2)])
REPLICAS = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=3), Split("MB", 2)])
Loss = Callable[[Tensor, Tensor], Tensor]  # of the log probabilities of a group, and its rewards


def ratio(p: Tensor) -> Tensor:
    return (p - p.detach()).exp()


def advantages(rewards: Tensor, dim: int = 1) -> Tensor:
    centred = rewards - rewards.mean(dim, keepdim=True)
    return centred / (rewards.std(dim, keepdim=True) + 1e-4)


def clipped(p: Tensor, rewards: Tensor) -> Tensor:
    own, scale = ratio(p), advantages(rewards)[..., None]
    return -torch.minimum(own * scale, own.clamp(0.8, 1.2) * scale).mean()


LOSSES: dict[str, Loss] = {
    "ratio": lambda p, r: -(ratio(p) * advantages(r)[..., None]).mean(),
    "clipped": clipped,
    "of groups": lambda p, r: -(ratio(p).mean(2) * advantages(r)).mean(1).mean(),
    "a difference": lambda p, r: (p * r[..., None]).mean() - (p.detach() * r[..., None]).mean(),
    "times a thousand": lambda p, r: 1e3 * (ratio(p) * advantages(r)[..., None]).mean(),
}


class Policy(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.loss = nn.Linear(WIDTH, 6), nn.Linear(6, 1), loss
        self.double()

    def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
        chances = self.head(torch.tanh(self.first(x))).squeeze(-1).sigmoid()
        return self.loss(chances.log(), rewards)


def data(seed: int) -> tuple[Tensor, Tensor]:
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return draw(ROWS, GROUP, LENGTH, WIDTH), draw(ROWS, GROUP)


WAYS = [(loss, one) for loss in LOSSES for one in (HALVES, REPLICAS)]


@one_of(2)
@pytest.mark.parametrize(("loss", "strategy"), every(3, WAYS))
def test_losses_that_vanish_train_as_in_plain_pytorch(loss: str, strategy: Strategy) -> None:
    make, batches = partial(Policy, LOSSES[loss]), [data(seed) for seed in range(3)]

    assert_trains_as_plain(make, strategy, batches, SGD, partial(pytest.approx, abs=1e-12))


MEETING: dict[str, Loss] = {
    "over rows": lambda p, r: -(ratio(p) * advantages(r, 0)[..., None]).mean(),
    "a power": lambda p, r: (ratio(p) ** len(p) * advantages(r)[..., None]).mean(),
    "small": lambda p, r: 1e-12 * (p.exp() ** len(p) * r[..., None]).mean(),
}


@pytest.mark.parametrize("loss", MEETING)
def test_rows_that_meet_in_a_small_loss_are_seen(
    loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Policy(MEETING[loss]), None, HALVES, [data(0)], optimizer=SGD, reduction="mean")

    assert "each microbatch uses its own rows" in caplog.text
