"""What Piper warns of when a model trains on one batch in two microbatches."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from piper import Place, Split, rehearse, where

HALVES = [Place(where(), [0]), Split("MB", 2)]
SGD = partial(torch.optim.SGD, lr=0.1)


def warned(
    caplog: pytest.LogCaptureFixture, model: nn.Module, loss_fn: Any, batch: Any, **options: Any
) -> list[str]:
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(model, loss_fn, HALVES, [batch], optimizer=SGD, **options)
    return caplog.messages
