"""State behind names that code builds, objects of torch, and modules that are not the model's."""

from __future__ import annotations

import builtins
import importlib
import inspect
import operator
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import dropout, mse_loss
from watched import Undo, assert_watched, set_to, undone

from piper.capture import capture
from piper.capture.python_state.watch import Watch


class Color(Enum):
    RED = 1


class Whole(int):
    pass


OPTIMIZER = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
SCHEDULE = optim.lr_scheduler.StepLR(OPTIMIZER, 1, 0.5)
GENERATOR = torch.Generator().manual_seed(3)
WHOLE, FACTOR, TEACHER = [Whole(1)], 1.0, nn.Dropout(0.5)
SETTINGS = types.ModuleType("settings_of_a_test")
SETTINGS.inner = types.SimpleNamespace(factor=1.0)  # type: ignore[attr-defined]


def scheduled() -> Undo:
    before = SCHEDULE.state_dict()
    OPTIMIZER.step()
    SCHEDULE.step()
    return lambda: (SCHEDULE.load_state_dict(before), set_rate(1.0))


def set_rate(rate: float) -> Undo:
    before = OPTIMIZER.param_groups[0]["lr"]
    OPTIMIZER.param_groups[0]["lr"] = rate
    return lambda: set_rate(before)


def seeded(seed: int) -> Undo:
    before = GENERATOR.initial_seed()
    GENERATOR.manual_seed(seed)
    return lambda: GENERATOR.manual_seed(before)


def replaced(items: list[Any], value: Any) -> Undo:
    before = items[0]
    items[0] = value
    return lambda: items.__setitem__(0, before)


GETTER, KEYS = operator.attrgetter("factor"), {"factor": 1.0}


def held(net: Any) -> float:
    return float(GETTER(SETTINGS.inner))


def matched(net: Any) -> float:
    match SETTINGS.inner:
        case types.SimpleNamespace(factor=found):
            return float(found)
    return 0.0


def matched_keys(net: Any) -> float:
    match KEYS:
        case {"factor": found}:
            return found
    return 0.0


def replaced_key(value: float) -> Undo:
    KEYS["factor"] = value
    return lambda: KEYS.update(factor=1.0)


set_to(Color.RED, "factor", 1.0)
for owner in (torch, np, builtins, nn.Linear):
    set_to(owner, "factor_of_a_test", 1.0)
own, here = "factor_of_a_test", sys.modules[__name__]
KINDS: dict[str, tuple[Callable[[Any], float], Callable[[], Undo]]] = {
    "rate of a scheduler": (lambda net: SCHEDULE.get_last_lr()[0], scheduled),
    "rate of an optimizer": (
        lambda net: OPTIMIZER.param_groups[0]["lr"], lambda: set_rate(0.25),
    ),
    "seed of a generator": (lambda net: float(GENERATOR.initial_seed()), lambda: seeded(5)),
    "attribute of a member": (
        lambda net: Color.RED.factor, lambda: set_to(Color.RED, "factor", 2.0),  # type: ignore[attr-defined]
    ),
    "own class of numbers": (lambda net: float(WHOLE[0]), lambda: replaced(WHOLE, Whole(2))),
    "attribute of torch": (
        lambda net: torch.factor_of_a_test, lambda: set_to(torch, own, 2.0),  # type: ignore[attr-defined]
    ),
    "attribute of numpy": (
        lambda net: np.factor_of_a_test, lambda: set_to(np, own, 2.0),  # type: ignore[attr-defined]
    ),
    "attribute of a class of torch": (
        lambda net: net.a.factor_of_a_test, lambda: set_to(nn.Linear, own, 2.0),
    ),
    "builtin": (
        lambda net: factor_of_a_test, lambda: set_to(builtins, own, 2.0),  # type: ignore[name-defined]  # noqa: F821
    ),
    "replaced builtin": (
        lambda net: float(abs(-1)), lambda: set_to(builtins, "abs", lambda _: 2.0),
    ),
    "evaluated text": (lambda net: eval("FACTOR * 1.0"), lambda: set_to(here, "FACTOR", 2.0)),  # noqa: S307
    "field of a format": (
        lambda net: float("{0.inner.factor}".format(SETTINGS)),  # noqa: UP030, UP032
        lambda: set_to(SETTINGS.inner, "factor", 2.0),
    ),
    "dotted name": (
        lambda net: operator.attrgetter("inner.factor")(SETTINGS),
        lambda: set_to(SETTINGS.inner, "factor", 2.0),
    ),
    "held getter": (held, lambda: set_to(SETTINGS.inner, "factor", 2.0)),
    "pattern of a class": (matched, lambda: set_to(SETTINGS.inner, "factor", 2.0)),
    "pattern of keys": (matched_keys, lambda: replaced_key(2.0)),
    "own module by import_module": (
        lambda net: importlib.import_module(__name__).FACTOR, lambda: set_to(here, "FACTOR", 2.0),
    ),
    "own module by __import__": (
        lambda net: __import__(__name__, fromlist=["x"]).FACTOR,
        lambda: set_to(here, "FACTOR", 2.0),
    ),
    "own module by inspect": (
        lambda net: inspect.getmodule(scheduled).FACTOR,  # type: ignore[union-attr]
        lambda: set_to(here, "FACTOR", 2.0),
    ),
    "globals of a frame": (
        lambda net: inspect.currentframe().f_globals["FACTOR"],  # type: ignore[union-attr]
        lambda: set_to(here, "FACTOR", 2.0),
    ),
    "globals of a function": (
        lambda net: scheduled.__globals__["FACTOR"], lambda: set_to(here, "FACTOR", 2.0),
    ),
    "later global": (lambda net: globals().get("LATER", 1.0), lambda: set_to(here, "LATER", 2.0)),
    "later attribute": (
        lambda net: 1.0 + hasattr(SETTINGS, "later"), lambda: set_to(SETTINGS, "later", 1),
    ),
    "mode of a teacher": (
        lambda net: float(TEACHER.training), lambda: set_to(TEACHER, "training", False),
    ),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, how: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.how = nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.how(self)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_is_watched(name: str) -> None:
    read, change = KINDS[name]
    assert_watched(Net(read), read, change)


def test_what_nobody_reads_is_not() -> None:
    seen = Watch(Net(lambda net: 1.0), mse_loss)

    for name in KINDS:
        with undone(KINDS[name][1]()):
            assert seen.now() == 0, name


def test_the_modes_of_the_model_are_no_state_of_python() -> None:
    net = Net(lambda net: 1.0)
    seen = Watch(net, mse_loss)
    net.eval()
    assert seen.now() == 0


def test_a_capture_leaves_builtins_alone() -> None:
    before = dict(vars(builtins))
    net = Net(lambda net: float(max(1, abs(-2))) + dropout(net.a.weight, 0.0).sum())
    capture(net, mse_loss, (torch.zeros(2, 3), torch.zeros(2, 3)))
    assert vars(builtins) == before
