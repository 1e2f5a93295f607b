"""A global with the name of an attribute is none of the forward's: a script has many of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, mse_loss
from watched import assert_watched, set_to, undone

from piper.capture.python_state.watch import Watch

HERE = sys.modules[__name__]
weight = bias = shape = loss = step = factor = 1.0


def by_global(x: Any) -> Any:
    return x * factor


def by_module(x: Any) -> Any:
    return x * HERE.factor  # type: ignore[attr-defined]


def by_table_of_modules(x: Any) -> Any:
    return x * sys.modules[__name__].factor  # type: ignore[attr-defined]


def by_text(x: Any) -> Any:
    return x * globals()["factor"]


def by_evaluation(x: Any) -> Any:
    return x * eval("factor")


class Net(nn.Module):
    def __init__(self, read: Callable[[Any], Any] = by_global) -> None:
        super().__init__()
        self.read, self.inner = read, nn.Linear(4, 4)
        self.loss = self.step = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = linear(x, self.inner.weight, self.inner.bias) * x.shape[-1]
        return self.read(found * self.loss + self.step)


@pytest.mark.parametrize("name", ["weight", "bias", "shape", "loss", "step"])
def test_attributes_have_names_of_their_own(name: str) -> None:
    seen = Watch(Net(), mse_loss)
    assert seen.now() == 0
    with undone(set_to(HERE, name, 2.0)):
        assert seen.now() == 0


@pytest.mark.parametrize(
    "read", [by_global, by_module, by_table_of_modules, by_text, by_evaluation]
)
def test_globals_are_watched_however_they_are_read(read: Callable[[Any], Any]) -> None:
    assert_watched(Net(read), lambda net: net.read(1.0), lambda: set_to(HERE, "factor", 2.0))
