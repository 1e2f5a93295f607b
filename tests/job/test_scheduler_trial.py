"""Schedulers that look at gradients, states or each other are refused; others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from replicas import Net, data
from torch.nn import functional
from torch.optim import lr_scheduler

from piper import Place, rehearse, where
from piper.errors import StrategyError
from piper.strategies import one_f_one_b

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
STRATEGIES = {"one": [Place(where(), [0])], "stages": one_f_one_b(pp=2, microbatches=2)}


class Scheduler(lr_scheduler.LRScheduler):
    def factor(self) -> float:
        return 1.0

    def get_lr(self) -> list[float]:
        return [rate * self.factor() for rate in self.base_lrs]

    @property
    def every(self) -> Iterator[torch.nn.Parameter]:
        return (p for group in self.optimizer.param_groups for p in group["params"])


class ByGradients(Scheduler):
    def factor(self) -> float:
        return 1 / (1 + sum(float(p.grad.norm()) for p in self.every if p.grad is not None))


class ByMomenta(Scheduler):
    def factor(self) -> float:
        found = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        return 1 / (1 + sum(float(one.norm()) for one in found if one is not None))


class ByWeights(Scheduler):
    def factor(self) -> float:
        return 1 / (1 + sum(float(p.detach().norm()) for p in self.every))


class Seeded(Scheduler):
    def factor(self) -> float:
        return float(torch.rand((), generator=torch.Generator().manual_seed(self.last_epoch)))


def counting() -> Callable[[Any], lr_scheduler.LRScheduler]:
    """The calls of all schedulers, from 0 when one is made."""
    calls = {"all": 0}

    def rate(step: int) -> float:
        calls["all"] += 1
        return 1 / calls["all"]

    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        calls["all"] = 0
        return lr_scheduler.LambdaLR(optimizer, rate)

    return make


def trained(strategy: str, make: Any) -> None:
    rehearse(
        Net(), functional.mse_loss, STRATEGIES[strategy], data(), optimizer=MOMENTUM,
        lr_scheduler=make,
    )  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_that_reads_gradients(strategy: str) -> None:
    with pytest.raises(StrategyError, match="lr_scheduler: what it sets depends on gradients"):
        trained(strategy, ByGradients)


@pytest.mark.parametrize(
    "make", [ByMomenta, ByWeights, counting()], ids=["momenta", "weights", "counting"]
)
def test_one_that_reads_states_or_calls(make: Any) -> None:
    with pytest.raises(StrategyError, match="lr_scheduler: what it sets depends on"):
        trained("stages", make)


@one_of(2)
@pytest.mark.parametrize(
    "make",
    [
        Seeded,
        partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20),
        partial(lr_scheduler.CosineAnnealingLR, T_max=5),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    ],
    ids=["seeded", "one cycle", "cosine", "lambda"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_those_that_count_steps_are_not_refused(strategy: str, make: Any) -> None:
    trained(strategy, make)
