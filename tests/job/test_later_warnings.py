"""A model in which rows begin to meet after the first step is warned of then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Trainer
from piper.strategies import gpipe

SGD = partial(torch.optim.SGD, lr=0.1)
MEET: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "roll": lambda h: h + h.roll(1, 0),
    "flip": lambda h: h + h.flip(0),
    "cumsum": lambda h: h.cumsum(0),
    "softmax": lambda h: h.softmax(0),
    "std": lambda h: h / (h.std(0) + 1),
    "first": lambda h: h - h[:1],
    "length": lambda h: h / len(h),
}


class Net(nn.Module):
    """Rows meet if the loop says so (`on`), in a mode, or in longer rows."""

    def __init__(self, meet: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.meet, self.on = nn.Linear(3, 3), meet, False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.meet(h) if self.on or not self.training or x.shape[1] > 2 else h


class Centred(nn.Module):
    """Computes with a buffer that it updates, once the loop says so."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(3, 3), False
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.on:
            self.mean.lerp_(h.detach().mean((0, 1)), 0.1)
            h = h - self.mean
        return h


def begin(model: nn.Module) -> None:
    model.on = True


CHANGES: dict[str, tuple[Callable[[nn.Module], object], int]] = {
    "a flag": (begin, 2),
    "a mode": (nn.Module.eval, 2),
    "a length": (lambda model: None, 3),
}


def said(model: nn.Module, change: Callable[[nn.Module], object], length: int, log) -> list[str]:
    """Warnings after the change."""
    x = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model, F.mse_loss, gpipe(pp=1, microbatches=4), example=(x, x), optimizer=SGD, device="cpu"
    )
    with log.at_level(logging.WARNING, "piper"):
        trainer.step(x, x)
        before = len(log.messages)
        change(model)
        longer = x.repeat(1, 2, 1)[:, :length]
        trainer.step(longer, longer)
        trainer.step(longer, longer)
    trainer.close()
    return log.messages[before:]


@one_of(2)
@pytest.mark.parametrize("name", every(8, MEET, MEET))
@pytest.mark.parametrize("change", every(1, CHANGES, CHANGES))
def test_rows_that_begin_to_meet_are_warned_of_once(name: str, change: str, caplog) -> None:
    found = said(Net(MEET[name]), *CHANGES[change], caplog)

    assert ["rows of the batch meet" in line for line in found] == [True]


def test_a_buffer_that_begins_to_matter_is_warned_of(caplog) -> None:
    found = said(Centred(), *CHANGES["a flag"], caplog)

    assert any("computes with mean and updates it" in line for line in found)
