"""Optimizers that give a parameter new memory, instead of writing to what it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from replicas import Net, data
from torch import Tensor
from torch.nn.functional import mse_loss

from piper import Offload, Place, Replicate, rehearse, where
from piper.errors import PiperError

Update = Callable[[Any, Tensor, dict[str, Any]], None]
ONE = [Place(where(), [0])]
STRATEGIES = {
    "one": ONE,
    "replicas": [Place(where(), [0, 1]), Replicate(where(), [0, 1])],
    "shards": [Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=3)],
    "host": [*ONE, Offload(where(), "optimizer")],
}


class Scaled(Net):
    """With a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Assigning(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, parameters: Any, update: Update) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.update = update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"] * p.grad, self.state[p])


def to_data(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    p.data = p.data - change


def detached(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    p.data = (p - change).detach()


def by_set(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    with torch.no_grad():
        p.set_(p - change)


def back_and_forth(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    before = p.data
    p.data = p.data + change
    p.data = before
    p.data.sub_(p.data * 0.01 + change)


def looks_ahead(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    slow = held.setdefault("slow", p.data)  # the memory of before, which nobody writes to then
    p.data = p.data - change + 0.1 * (slow - p.data)


def momentum(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    held["average"] = held.get("average", torch.zeros_like(change)) * 0.5 + change
    p.data = p.data - held["average"]


def views(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    both = held.setdefault("both", torch.zeros(2, *p.shape, dtype=p.dtype))
    held.setdefault("last", both[1]).copy_(change)
    p.data.sub_(both.sum(0))


def turned(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    last = held.setdefault("last", torch.zeros_like(p)).add_(change)
    held.setdefault("turned", last.mT if p.dim() > 1 else last.view_as(last)).mul_(0.5)
    p.data.sub_(held["last"])


def transposed(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    p.data.sub_(change)
    if p.dim() == 2 and p.shape[0] == p.shape[1]:
        p.data = p.data.t()


def previous(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    p.data = p.data - change - 0.1 * (p.data - held.get("previous", p.data))
    held["previous"] = p.data


UPDATES = [to_data, detached, by_set, back_and_forth, looks_ahead, momentum, views, turned]


def plain(make: Any) -> dict[str, Tensor]:
    model = Scaled()
    plain_losses(make(model.parameters()), data(), lambda x, y: mse_loss(model(x), y))
    return {name: one.detach() for name, one in model.named_parameters()}


@one_of(2)
@pytest.mark.parametrize(("name", "update"), every(7, product(STRATEGIES, UPDATES)))
def test_what_an_optimizer_assigns_is_trained(name: str, update: Update) -> None:
    make = partial(Assigning, update=update)

    found = rehearse(Scaled(), mse_loss, STRATEGIES[name], data(), optimizer=make).parameters

    torch.testing.assert_close(found, plain(make))


def follows(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    held.setdefault("start", p.data)
    p.data.sub_(change)


class Early(Assigning):
    """Keeps it from the beginning."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, follows)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["start"] = p.data


@one_of(2)
@pytest.mark.parametrize("make", [partial(Assigning, update=follows), Early])
@pytest.mark.parametrize("what", [("optimizer",), ("parameters",), ("optimizer", "parameters")])
def test_state_that_is_the_parameter_cannot_be_on_the_host(make: Any, what: Any) -> None:
    away = [*ONE, *(Offload(where(), one) for one in what)]
    with pytest.raises(PiperError, match=r"keeps a parameter itself in state\['start'\]"):
        rehearse(Scaled(), mse_loss, away, data(), optimizer=make)


def freezes(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    p.data.sub_(change)
    held["count"] = held.get("count", 0) + 1
    p.requires_grad_(held["count"] < 2)


def test_a_step_that_freezes_a_parameter_is_refused() -> None:
    make = partial(Assigning, update=freezes)
    with pytest.raises(PiperError, match="the step of Assigning sets requires_grad"):
        rehearse(Scaled(), mse_loss, ONE, data(), optimizer=make)


def without_biases(named: Any) -> torch.optim.Optimizer:
    for name, one in (named := list(named)):
        one.requires_grad_("bias" not in name)
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize("name", every(2, STRATEGIES))
def test_a_function_that_freezes_parameters_is_refused(name: str) -> None:
    with pytest.raises(PiperError, match=r"it freezes .*bias \(requires_grad\)"):
        rehearse(Scaled(), mse_loss, STRATEGIES[name], data(), optimizer=without_biases)


def in_list(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    held.setdefault("history", []).append(p.data)
    p.data = p.data - change


def in_dict(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    held["old"] = {"value": p.data[:1] if p.dim() else p.data}
    p.data = p.data - change


OLD: dict[int, Tensor] = {}


def elsewhere(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    OLD[id(p)] = p.data
    p.data = p.data - change


@one_of(2)
@pytest.mark.parametrize(
    ("name", "update"), every(2, product(("one", "replicas"), (in_list, in_dict, elsewhere)))
)
def test_old_memory_that_is_kept_out_of_sight(name: str, update: Update) -> None:
    """In plain PyTorch it has old values."""
    make = partial(Assigning, update=update)
    with pytest.raises(PiperError, match="keeps the memory of a parameter"):
        rehearse(Scaled(), mse_loss, STRATEGIES[name], data(), optimizer=make)


def slow(p: Any, change: Tensor, held: dict[str, Any]) -> None:
    """From the second step on, the state is the parameter, and is written with it."""
    p.data.sub_(change)
    if "slow" not in held:
        held["slow"] = p.data.clone()
        p.data = held["slow"]
    p.data.sub_(0.1 * held["slow"])


@one_of(2)
@pytest.mark.parametrize(
    ("name", "update"), every(2, product(("one", "replicas"), (slow, previous, transposed)))
)
def test_state_and_layouts_of_new_memory(name: str, update: Update) -> None:
    make = partial(Assigning, update=update)
    found = rehearse(Scaled(), mse_loss, STRATEGIES[name], data(), optimizer=make).parameters
    torch.testing.assert_close(found, plain(make))
