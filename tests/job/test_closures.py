"""Optimizers whose step computes the loss again are refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from piper import rehearse
from piper.errors import StrategyError


class Asserting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it needs a closure"
        found = closure()
        super().step()
        return found


class Required(torch.optim.Adam):
    def step(self, closure: Callable[[], float]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step()


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("SAM requires a closure")
        closure()
        return super().step()


class Allowed(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        found = None if closure is None else closure()
        super().step()
        return found


BATCHES = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(2)]


@pytest.mark.parametrize("kind", [Asserting, Required, Raising])
def test_a_step_that_needs_a_closure_is_refused(kind: Any) -> None:
    with pytest.raises(StrategyError, match="its step needs a closure"):
        rehearse(nn.Linear(3, 1), F.mse_loss, None, BATCHES, optimizer=partial(kind, lr=0.1))


def test_a_step_that_takes_one_is_called_without() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    found = rehearse(model, F.mse_loss, None, BATCHES, optimizer=partial(Allowed, lr=0.1))
    plain = rehearse(model, F.mse_loss, None, BATCHES, optimizer=partial(torch.optim.SGD, lr=0.1))
    assert found.losses == plain.losses
