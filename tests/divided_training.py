"""A model that is divided over devices trains as a plain loop does, in float64."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import nn
from torch.nn import functional

from piper import rehearse, strategies

SGD = partial(torch.optim.SGD, lr=0.1)


def assert_trains_divided(model: nn.Module, how: dict[str, Any]) -> None:
    """`how`: tp or cp. The model maps rows of [8, 8] to such rows."""
    drawn = torch.randn(2, 2, 4, 8, 8, dtype=torch.float64, generator=torch.Generator())
    batches = [(x, y) for x, y in drawn]
    plain, loss = copy.deepcopy(model), functional.mse_loss
    wanted = plain_losses(SGD(plain.parameters()), batches, lambda x, y: loss(plain(x), y))

    strategy = strategies.one_f_one_b(pp=1, microbatches=2, **how)
    found = rehearse(model, loss, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in plain.named_parameters():
        given = found.parameters[name], parameter.detach()
        torch.testing.assert_close(*given, rtol=1e-11, atol=1e-12)
