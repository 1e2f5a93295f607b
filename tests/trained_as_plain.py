"""A model with its own loss, trained under a strategy and in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import nn

from piper import Strategy, rehearse

NEAR = partial(pytest.approx, rel=1e-12)


def assert_trains_as_plain(
    make: Callable[[], nn.Module],
    strategy: Strategy,
    batches: Sequence[Any],
    optimizer: Callable[..., torch.optim.Optimizer],
    near: Callable[[list[float]], Any] = NEAR,
) -> None:
    model = make()
    losses = plain_losses(optimizer(model.parameters()), batches, model)

    found = rehearse(make(), None, strategy, batches, optimizer=optimizer)

    assert found.losses == near(losses)
    trained = [(name, one) for name, one in model.named_parameters() if one.grad is not None]
    assert trained
    for name, one in trained:
        torch.testing.assert_close(found.parameters[name], one.detach(), rtol=1e-10, atol=1e-12)
