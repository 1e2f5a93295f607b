"""Losses that divide by a count times a number of tokens, in replicas of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Trainer
from piper.strategies import gpipe

CLASSES, LENGTHS = 5, (6, 3)
SGD = partial(torch.optim.SGD, lr=0.1)
Count = Callable[[Tensor], Tensor]


def by_shares(y: Tensor) -> Tensor:
    """As lengths of rows that are given as shares of the longest."""
    return (y != -100).double().mean(1).sum() * y.shape[1]


def by_elements(y: Tensor) -> Tensor:
    return (y != -100).double().mean() * y.numel()


def twice(y: Tensor) -> Tensor:
    return 2 * (y != -100).sum() * 0.5


COUNTS: dict[str, Count] = {"shares": by_shares, "elements": by_elements, "constants": twice}


def loss_of(count: Count, output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, labels, reduction="sum") / count(labels)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(CLASSES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + replica)
    x, y = (torch.randint(CLASSES, (4, LENGTHS[replica]), generator=draw) for _ in range(2))
    y[replica, 1:] = -100
    return x, y


def train(rank: int, name: str) -> list[float]:
    loss_fn = partial(loss_of, COUNTS[name])
    strategy = gpipe(pp=1, dp=2, microbatches=2)
    with Trainer(net(), loss_fn, strategy, example=batch(0, 0), optimizer=SGD) as trainer:
        return [trainer.step(*batch(trainer.replica, step)).loss for step in range(3)]


def plainly() -> list[float]:
    model, found = net(), []
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        parts = [batch(replica, step) for replica in range(2)]
        sums = [F.cross_entropy(model(x).mT, y, reduction="sum") for x, y in parts]
        loss = sum(sums, torch.zeros(())) / sum((y != -100).sum() for _, y in parts)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found
