"""Averages of weights in processes: train, evaluate with them, save, resume, go on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import piper
from piper.strategies import one_f_one_b, zbv

DECAY, STEPS = 0.8, 4
ADAM = partial(torch.optim.AdamW, lr=0.05)


class Tied(nn.Module):
    """The first and the last layer share a weight, so a device has a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.middle = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("L"):
            x = torch.tanh(self.first(x))
        for layer in self.middle:
            with piper.annotate("L"):
                x = x + torch.tanh(layer(x))
        with piper.annotate("L"):
            return functional.linear(self.frozen(x), self.first.weight.T)


def data(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [tuple(torch.randn(2, 8, 6, generator=draw).double()) for _ in range(steps)]


def plain(steps: int = STEPS) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and averages of a plain loop, with torch's own averages."""
    model = Tied().double()
    means = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = ADAM([one for one in model.parameters() if one.requires_grad])
    for x, y in data(steps):
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        means.update_parameters(model)
    return dict(model.state_dict()), dict(means.module.state_dict())


def loss_of(weights: dict[str, Tensor]) -> float:
    model = Tied().double()
    model.load_state_dict(weights)
    with torch.no_grad():
        return float(functional.mse_loss(model(data()[0][0]), data()[0][1]))


def trainer_under(strategy: Any) -> piper.Trainer:
    model, first = Tied().double(), data()[0]
    return piper.Trainer(
        model, functional.mse_loss, strategy, example=part(first, 0, 2), optimizer=ADAM, ema=DECAY,
        device="cpu",
    )  # fmt: skip


def part(batch: tuple[Tensor, Tensor], replica: int, replicas: int) -> tuple[Tensor, ...]:
    return tuple(one.chunk(replicas)[replica] for one in batch)


def own(trainer: piper.Trainer, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return part(batch, trainer.replica, trainer.replicas)


def save_beside(_: int, folder: str) -> list[float]:
    """Calls that exchange tensors while a checkpoint is being written."""
    trainer = trainer_under(one_f_one_b(pp=1, dp=2, microbatches=2))
    losses = []
    for number, batch in enumerate(data(6)):
        losses.append(trainer.step(*own(trainer, batch)).loss)
        trainer.save(folder, wait=False, keep=2)
        if number % 2:
            trainer.retarget(one_f_one_b(pp=1, dp=2, zero=number % 4, microbatches=2))
        else:
            with trainer.averaged():
                trainer.state_dict()
    trainer.close()
    return losses


def train_on(_: int, folder: str) -> Any:
    """Half of the steps, a checkpoint; then another strategy resumes, and a third goes on."""
    trainer = trainer_under(one_f_one_b(pp=2, dp=2, microbatches=2, zero=1))
    for batch in data()[:2]:
        trainer.step(*own(trainer, batch))
    with trainer.averaged():
        early = trainer.evaluate([own(trainer, data()[0])]).loss
        means = trainer.state_dict()
    trainer.save(Path(folder))
    trainer.close()
    second = trainer_under(zbv(pp=2, dp=2, microbatches=2, zero=3))
    second.resume(Path(folder))
    second.step(*own(second, data()[2]))
    second.retarget(one_f_one_b(pp=4, microbatches=4))
    second.step(*own(second, data()[3]))
    with second.averaged():
        late, last = second.evaluate([own(second, data()[0])]).loss, second.state_dict()
    trained = second.evaluate([own(second, data()[0])]).loss, second.state_dict()
    second.close()
    return early, means, late, last, *trained
