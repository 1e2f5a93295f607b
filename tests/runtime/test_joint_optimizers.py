"""Optimizers that look at several parameters at once are refused: each bucket has its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from replicas import Net, data
from torch.nn import functional

from piper import Place, rehearse, where
from piper.errors import StrategyError

ONE = [Place(where(), [0])]


class Clipping(torch.optim.SGD):
    """Clips by the norm of all that it has."""

    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 0.1)
        super().step(closure)


class Signs(torch.optim.Optimizer):
    """By the sign of each element; matrices by half."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign() * (0.5 if p.dim() > 1 else 1.0)


def by_name(named: Any) -> Signs:
    """Knows no names but those of the model."""
    rates = {"first.weight": 0.1, "first.bias": 0.2, "last.weight": 0.3, "last.bias": 0.4}
    return Signs([{"params": [p], "lr": rates[name]} for name, p in named], lr=0.1)


def test_one_that_clips_for_itself_is_refused() -> None:
    with pytest.raises(StrategyError) as refused:
        rehearse(Net(), functional.mse_loss, ONE, data(), optimizer=partial(Clipping, lr=0.1))

    assert str(refused.value) == (
        "optimizer: Clipping updates parameters together differently than one by one, and every "
        "bucket of parameters has its own optimizer\n"
        "  fix: look at one parameter at a time; to clip by the norm of all gradients, give "
        "Trainer(max_norm=...)"
    )


@pytest.mark.parametrize("make", [partial(Signs, lr=0.1), by_name], ids=["signs", "by name"])
def test_one_by_one_is_exact(make: Any) -> None:
    model = Net()
    optimizer = make(list(model.named_parameters()))
    for x, y in data():
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    found = rehearse(Net(), functional.mse_loss, ONE, data(), optimizer=make)

    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach())
