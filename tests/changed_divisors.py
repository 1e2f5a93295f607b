"""A loop changes what a loss divides by: microbatches are weighed by what it divides by now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Trainer
from piper.strategies import gpipe

CLASSES, ROWS, STEPS = 4, 8, 5
SGD = partial(torch.optim.SGD, lr=0.3)
HEAVY = torch.tensor([1.0, 2.0, 3.0, 9.0], dtype=torch.float64)


class Hard(nn.Module):
    """A mean over the labels above a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = -1

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        chosen = labels > self.threshold
        losses = F.cross_entropy(output, labels, reduction="none")
        return (losses * chosen).sum() / chosen.sum().clamp(min=1)


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.ones(CLASSES, dtype=torch.float64))


def other_weight(loss: nn.Module, step: int) -> None:
    loss.weight = HEAVY.clone() if step % 3 else torch.ones_like(HEAVY)


def written_weight(loss: nn.Module, step: int) -> None:
    loss.weight.copy_(HEAVY if step % 3 else torch.ones_like(HEAVY))


def ignored(loss: nn.Module, step: int) -> None:
    loss.ignore_index = 2 if step % 3 else -100


def threshold(loss: nn.Module, step: int) -> None:
    loss.threshold = 1 if step % 3 else -1


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, int], None]]
CASES: dict[str, Case] = {
    "other weights": (weighted, other_weight),
    "weights in place": (weighted, written_weight),
    "weights at last": (nn.CrossEntropyLoss, other_weight),
    "an ignored class": (nn.CrossEntropyLoss, ignored),
    "a threshold": (Hard, threshold),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(CLASSES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Labels that differ much between the microbatches of a step."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=draw)
    return x, torch.arange(ROWS).add(step).div(3, rounding_mode="floor") % CLASSES


def trained(case: Case, replicas: int = 1, replica: int = 0) -> list[float]:
    """Changes the loss before every step but the first."""
    (make, change), losses = case, []
    loss, rows, strategy = make(), ROWS // replicas, gpipe(pp=1, dp=replicas, microbatches=2)
    own = [tuple(one[replica * rows :][:rows] for one in batch(step)) for step in range(STEPS)]
    trainer = Trainer(model(), loss, strategy, example=own[0], optimizer=SGD, device="cpu")
    for step in range(STEPS):
        if step:
            change(loss, step)
        losses.append(trainer.step(*own[step]).loss)
    trainer.close()
    return losses


def plain(case: Case) -> list[float]:
    make, change = case
    loss, network, losses = make(), model(), []
    optimizer = SGD(network.parameters())
    for step in range(STEPS):
        if step:
            change(loss, step)
        x, y = batch(step)
        optimizer.zero_grad()
        found = loss(network(x), y)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def on_two(rank: int) -> list[float]:
    return trained(CASES["other weights"], replicas=2, replica=rank)
