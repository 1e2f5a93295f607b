"""The optimizer of a plain loop that stays around a Trainer trains nothing, and is told so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from draws import one_of
from torch import nn
from torch.nn import functional as F

from piper import Trainer

MESSAGE = "Leave out the optimizer's step"
BATCH = torch.randn(4, 3), torch.randn(4, 1)


@contextmanager
def trained() -> Iterator[tuple[nn.Module, Trainer]]:
    model = nn.Linear(3, 1)
    with Trainer(model, F.mse_loss, example=BATCH, device="cpu") as trainer:
        yield model, trainer


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [one], "lr": 0.1} for one in model.parameters()]


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "groups": lambda model: torch.optim.Adam(groups(model)),
    "a part": lambda model: torch.optim.SGD([model.bias], lr=0.1),
}


@one_of(2)
@pytest.mark.parametrize("name", MADE)
def test_it_is_told_once(name: str) -> None:
    with trained() as (model, trainer), pytest.warns(UserWarning, match=MESSAGE) as told:
        optimizer = MADE[name](model)
        for _ in range(3):
            trainer.step(*BATCH)
            optimizer.step()
    assert len(told) == 1 and told[0].filename == __file__


def test_others_are_not() -> None:
    """Of another model, with gradients of its own, of no Trainer any more, and the Trainer's."""
    other = nn.Linear(3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trained() as (model, trainer):
            trainer.step(*BATCH)
            torch.optim.SGD(other.parameters(), lr=0.1).step()
            weights = trainer.state_dict()
            assert weights is not None
            model.load_state_dict(weights)
        torch.optim.SGD(model.parameters(), lr=0.1).step()


READS: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a norm to log": lambda model: [
        p.grad.norm() for p in model.parameters() if p.grad is not None
    ],
    "one parameter": lambda model: next(model.parameters()).grad,
}


@pytest.mark.parametrize("name", READS)
def test_gradients_that_are_not_there_are_told_once(name: str) -> None:
    with trained() as (model, trainer), pytest.warns(UserWarning, match="max_norm") as told:
        for _ in range(3):
            trainer.step(*BATCH)
            READS[name](model)
    assert len(told) == 1 and told[0].filename == __file__


def test_gradients_may_be_cleared() -> None:
    """By what a plain loop does, before and after a step."""
    with warnings.catch_warnings(), trained() as (model, trainer):
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model.zero_grad()
            trainer.step(*BATCH)
