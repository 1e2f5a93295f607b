"""Loops that keep what their function has made, and change more than options of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from draws import every, one_of
from replicas import Net, data
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from piper import Offload, Place, Trainer, rehearse, where
from piper.errors import InputError, PiperError

Optimizers = list[torch.optim.Optimizer]
ONE = [Place(where(), [0])]
STRATEGIES = {
    "one": ONE,
    "optimizer": [*ONE, Offload(where(), "optimizer")],
    "parameters": [*ONE, Offload(where(), "parameters")],
}


class Own(torch.optim.SGD):
    """Not torch's, with an attribute that its step reads."""

    scale = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in weights([self]):
            p.grad = p.grad * self.scale
        super().step()


def weights(made: Optimizers) -> list[torch.nn.Parameter]:
    return [p for one in made for group in one.param_groups for p in group["params"]]


def freezes(made: Optimizers) -> None:
    weights(made)[-1].requires_grad_(False)


def assigns(made: Optimizers) -> None:
    for p in weights(made):
        p.data = p.data * 0.5


def writes(made: Optimizers) -> None:
    with torch.no_grad():
        weights(made)[0].mul_(0.5)


def sets(made: Optimizers) -> None:
    with torch.no_grad():
        weights(made)[0].set_(weights(made)[0] * 0.5)


def removes(made: Optimizers) -> None:
    made[-1].param_groups[0]["params"].pop()


def hooks(made: Optimizers) -> None:
    for one in made:
        one.register_step_post_hook(lambda *_: None)


def gradient_hooks(made: Optimizers) -> None:
    for p in weights(made):
        p.register_hook(lambda grad: grad * 0.5)


def replaces_step(made: Optimizers) -> None:
    for one in made:
        one.step = lambda closure=None: None  # type: ignore[method-assign]


def replaces_class(made: Optimizers) -> None:
    for one in made:
        one.__class__ = type("Other", (type(one),), {})


def forgets(made: Optimizers) -> None:
    made[-1].state.clear()


CHANGES = {
    freezes: "has set requires_grad of last.bias",
    assigns: "has written to first.weight",
    writes: "has written to first.weight",
    sets: "has written to first.weight",
    removes: "has put other parameters into groups",
    hooks: "has put a hook on an optimizer",
    gradient_hooks: "has put a hook on an optimizer",
    replaces_step: "or replaced its step",
    replaces_class: "or replaced its step",
    forgets: "has changed the state of some optimizers only",
}


def train(
    strategy: Any, kind: type[torch.optim.SGD], change: Callable[[Optimizers, Optimizers], None]
) -> list[float]:
    """`change` gets those that train, and all that the function has made."""
    made: Optimizers = []

    def make(named: Any) -> torch.optim.Optimizer:
        made.append(kind(named, lr=0.1, momentum=0.9))
        return made[-1]

    trainer = Trainer(Net(), mse_loss, strategy, example=data()[0], optimizer=make)
    losses = [trainer.step(*data()[0]).loss]
    change(list(trainer._programs.state.optimizers().values()), made)
    losses += [trainer.step(*batch).loss for batch in data(steps=4)[1:]]
    trainer.close()
    return losses


CASES = [*product(STRATEGIES, (torch.optim.SGD, Own), CHANGES)]


@one_of(2)
@pytest.mark.parametrize(("name", "kind", "change"), every(7, CASES))
def test_what_plans_would_not_see_is_refused(name: str, kind: Any, change: Any) -> None:
    with pytest.raises(InputError, match=CHANGES[change]):
        train(STRATEGIES[name], kind, lambda live, _: change(live))


def set_rate(made: Optimizers) -> None:
    for group in (group for one in made for group in one.param_groups):
        group["lr"] = 0.01


def set_attribute(made: Optimizers) -> None:
    for one in made:
        vars(one)["scale"] = 0.01


@pytest.mark.parametrize(
    ("change", "which"), every(2, product([set_rate, set_attribute], ["trials", "the first one"]))
)
def test_options_of_some_that_were_made(change: Any, which: str) -> None:
    """What was made for a trial trains nothing."""

    def some(live: Optimizers, made: Optimizers) -> None:
        trials = [one for one in made if all(one is not other for other in live)]
        change(trials if which == "trials" else live[:1])

    with pytest.raises(InputError, match=r"has set .*=0.01 in some optimizers only"):
        train(ONE, Own, some)


@pytest.mark.parametrize("change", [set_rate, set_attribute])
def test_options_of_all_that_were_made(change: Any) -> None:
    model = Net()
    plain = Own(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(data(steps=4)):
        loss = mse_loss(model(x), y)
        plain.zero_grad()
        loss.backward()
        plain.step()
        losses.append(loss.item())
        if step == 0:
            change([plain])

    found = train(ONE, Own, lambda _, made: change(made))

    assert found == pytest.approx(losses, rel=1e-12)


def fill(rate: Any) -> None:
    rate.fill_(0.01)


def scale(rate: Any) -> None:
    rate.data.mul_(0.1)


@pytest.mark.parametrize(("own", "write"), every(3, product([False, True], [fill, scale])))
def test_a_rate_that_the_loop_has_too(own: bool, write: Any) -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    make = partial(torch.optim.SGD, lr=rate)
    with pytest.raises(InputError, match="has written to the tensor that it gave as lr"):
        trainer = Trainer(
            Net(), mse_loss, ONE, example=data()[0],
            optimizer=(lambda named: make(named)) if own else make,
        )  # fmt: skip
        for batch in data():
            trainer.step(*batch)
            write(rate)


class Scheduler(LambdaLR):
    """Changes an optimizer late, where no trial has seen it."""

    def __init__(self, optimizer: torch.optim.Optimizer, change: Any) -> None:
        self.change = change
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 8:
            self.change([self.optimizer])


def by_weights(made: Optimizers) -> None:
    for group in made[0].param_groups:
        group["lr"] = group["params"][0].sum().item()


LATE = {
    freezes: "its step has set requires_grad",
    removes: "its step has put other parameters",
    hooks: "its step has put a hook",
    by_weights: r"its step has set lr=.* in some optimizers only",
}


@one_of(2)
@pytest.mark.parametrize("change", LATE)
def test_a_scheduler_that_changes_more_than_options(change: Any) -> None:
    batches = [*data(steps=5), *data(steps=5)]
    with pytest.raises(PiperError, match=LATE[change]):
        rehearse(
            Net(), mse_loss, ONE, batches, optimizer=partial(torch.optim.SGD, lr=0.1),
            lr_scheduler=partial(Scheduler, change=change),
        )  # fmt: skip
