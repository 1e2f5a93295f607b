"""State of an optimizer that no checkpoint has is told of before it is lost."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

import piper
from piper.errors import InputError
from piper.runtime.optimizers.lost_state import lost_state
from piper.runtime.optimizers.small_parameters import Kind
from piper.strategies import gpipe

KINDS = [Kind("a.weight", 2, (3, 3)), Kind("a.bias", 1, (3,))]


class Own(SGD):
    def __init__(self, given: Any) -> None:
        super().__init__(given, lr=0.1)

    def every(self) -> list[Any]:
        return [one for group in self.param_groups for one in group["params"]]


class Counts(Own):
    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for one in self.every():
            one.grad.mul_(self.count)
        super().step()


class Remembers(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.means = getattr(self, "means", {})
        for one in self.every():
            self.means[id(one)] = self.means.get(id(one), 0) + one.grad
            one.grad.copy_(self.means[id(one)])
        super().step()


class Seldom(Own):
    """Goes back to slow weights after each ten steps."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.every():
            self.state[one].setdefault("slow", one.detach().clone())
        super().step()
        self.count += 1
        if self.count % 10 == 0:
            for one in self.every():
                one.copy_(self.state[one]["slow"])


def closure(named: Any) -> Optimizer:
    made, count = SGD(named, lr=0.1), [0]
    inner = made.step

    def step(*_: Any) -> None:
        count[0] += 1
        for group in made.param_groups:
            for one in group["params"]:
                one.grad.mul_(count[0])
        inner()

    made.step = step  # type: ignore[assignment]
    return made


LOST = {Counts: "self.count", Remembers: "self.means", Seldom: "self.count",
        closure: "variables of its own"}  # fmt: skip


@pytest.mark.parametrize("make", LOST)
def test_what_would_be_lost_is_named(make: Any) -> None:
    assert lost_state(make, KINDS) == LOST[make]


class InState(Own):
    """Counts where it is kept."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.every():
            self.state[one]["count"] = self.state[one].get("count", 0) + 1
            one.grad.mul_(self.state[one]["count"])
        super().step()


class OnlyCounts(Own):
    """Nothing that it computes depends on it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        super().step()


@pytest.mark.parametrize("make", [InState, OnlyCounts, partial(SGD, lr=0.1, momentum=0.9), AdamW])
def test_what_is_kept_or_not_read_is_fine(make: Any) -> None:
    assert lost_state(make, KINDS) is None


def test_a_job_says_so_when_it_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    net, batch = nn.Linear(3, 3), (torch.ones(2, 3), torch.ones(2, 3))
    with caplog.at_level(logging.WARNING, "piper"):
        piper.rehearse(net, mse_loss, gpipe(pp=1, microbatches=1), [batch], optimizer=Counts)
    found = [one.getMessage() for one in caplog.records if one.name == "piper"]
    assert len(found) == 1 and found[0].startswith("the optimizer's step reads self.count, which")


@pytest.mark.parametrize("make", [Counts, InState])
def test_another_strategy_is_refused_if_it_would_be_lost(make: Any) -> None:
    net, batch = nn.Linear(3, 3), (torch.ones(2, 3), torch.ones(2, 3))
    trainer = piper.Trainer(net, mse_loss, example=batch, optimizer=make)
    trainer.step(*batch)

    if make is InState:
        trainer.retarget(gpipe(pp=1, microbatches=2))
    else:
        with pytest.raises(InputError, match=r"reads self.count, .* would begin anew"):
            trainer.retarget(gpipe(pp=1, microbatches=2))
    trainer.step(*batch)
    trainer.close()
