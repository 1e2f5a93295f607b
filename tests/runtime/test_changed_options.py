"""Loops that change the options of optimizers which their function has made."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from replicas import Net, data
from torch.nn.functional import mse_loss

from piper import Place, Trainer, where
from piper.errors import InputError

TWO_BUCKETS = [Place(where(), [0])]
CHANGES = {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1, "nesterov": True}


def change(made: list[torch.optim.Optimizer], name: str) -> None:
    for group in (group for one in made for group in one.param_groups):
        group[name] = CHANGES[name]


def trained(name: str, some: slice) -> list[float]:
    made: list[torch.optim.Optimizer] = []

    def make(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(named, lr=0.1, momentum=0.9))
        return made[-1]

    trainer = Trainer(Net(), mse_loss, TWO_BUCKETS, example=data()[0], optimizer=make)
    losses = []
    for step, batch in enumerate(data(steps=4)):
        losses.append(trainer.step(*batch).loss)
        if step == 1:
            change(made[some], name)
    trainer.close()
    return losses


@one_of(2)
@pytest.mark.parametrize("name", CHANGES)
def test_options_of_some_optimizers_only_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"has set {name}=.* in some optimizers only"):
        trained(name, slice(-1, None))


def plain(name: str) -> list[float]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = lambda x, y: mse_loss(model(x), y)  # noqa: E731
    first = plain_losses(optimizer, data(steps=4)[:2], loss)
    change([optimizer], name)
    return [*first, *plain_losses(optimizer, data(steps=4)[2:], loss)]


@pytest.mark.parametrize("name", ["lr", "nesterov"])
def test_options_of_all_optimizers_are_those_of_plain_training(name: str) -> None:
    assert trained(name, slice(None)) == pytest.approx(plain(name), rel=1e-12)


def test_a_scheduler_may_change_options() -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    trainer = Trainer(
        Net(), mse_loss, TWO_BUCKETS, example=data()[0],
        optimizer=partial(torch.optim.SGD, lr=0.1), lr_scheduler=schedule,
    )  # fmt: skip
    assert [trainer.step(*batch).lr for batch in data()] == [0.1, 0.05, 0.025]
    trainer.close()
