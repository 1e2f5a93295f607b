"""Optimizers and schedulers that change weights outside of a step are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from replicas import Net, data
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from piper import Place, rehearse, where
from piper.errors import PiperError, StrategyError

ONE = [Place(where(), [0])]


def halve(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def halve_hidden(p: torch.nn.Parameter) -> None:
    p.data.mul_(0.5)


def assign(p: torch.nn.Parameter) -> None:
    p.data = p.data * 0.5


def fill(p: torch.nn.Parameter) -> None:
    torch.nn.init.constant_(p, 0.25)


def normalize(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(functional.normalize(p, dim=0))


CHANGES = [halve, halve_hidden, assign, fill, normalize]


class Changing(torch.optim.SGD):
    def __init__(self, named: Any, change: Callable[[Any], None], chosen: str = "") -> None:
        named = list(named)
        super().__init__(named, lr=0.1)
        for name, p in named:
            if name.startswith(chosen):
                change(p)


class Decaying(LambdaLR):
    def __init__(self, optimizer: torch.optim.Optimizer, change: Callable[[Any], None]) -> None:
        self.change = change
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                self.change(p)


@one_of(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("chosen", ["", "last.weight"])
def test_an_optimizer_that_changes_weights_where_it_is_made(
    change: Callable[[Any], None], chosen: str
) -> None:
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    make = partial(Changing, change=change, chosen=chosen)
    with pytest.raises(StrategyError, match=r"optimizer: it changes .* where it is made"):
        rehearse(net, functional.mse_loss, ONE, data(), optimizer=make)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


@one_of(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_scheduler_that_changes_weights(change: Callable[[Any], None]) -> None:
    make, scheduler = partial(torch.optim.SGD, lr=0.1), partial(Decaying, change=change)
    with pytest.raises(StrategyError, match="lr_scheduler: it changes"):
        rehearse(Net(), functional.mse_loss, ONE, data(), optimizer=make, lr_scheduler=scheduler)


@one_of(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_scheduler_that_changes_weights_late(change: Callable[[Any], None]) -> None:
    class Late(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if self.last_epoch == 8:
                change(self.optimizer.param_groups[0]["params"][-1])

    make, batches = partial(torch.optim.SGD, lr=0.1), [*data(), *data(), *data()]
    scheduler = partial(Late, lr_lambda=lambda step: 1.0)
    with pytest.raises(PiperError, match="lr_scheduler: its step has written to"):
        rehearse(Net(), functional.mse_loss, ONE, batches, optimizer=make, lr_scheduler=scheduler)


def test_large_weights_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper.runtime.optimizers.changed_weights.SMALL", 0)
    with pytest.raises(StrategyError, match="where it is made"):
        rehearse(Net(), functional.mse_loss, ONE, data(), optimizer=partial(Changing, change=halve))
