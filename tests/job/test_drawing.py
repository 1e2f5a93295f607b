"""What `piper.draw` shows is what a strategy orders."""

from __future__ import annotations

import pytest
import torch
from draws import every
from torch import nn
from torch.nn import functional

import piper
from piper.errors import PiperError
from piper.strategies import BUILDERS
from piper.strategies.timing import strategy_rows
from piper.view.schedule_grid import grid

PLAIN = [name for name in BUILDERS if "dualpipe" not in name]  # the order in these slots is chosen
EXAMPLE = torch.zeros(16, 512), torch.zeros(16, 512)  # large: stages have as many layers


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


@pytest.mark.parametrize("name", every(2, PLAIN))
def test_builders_are_drawn_as_they_order(name: str) -> None:
    strategy = BUILDERS[name](pp=2, microbatches=4)

    drawn = piper.draw(net(), functional.mse_loss, strategy, EXAMPLE)

    assert drawn == grid(strategy_rows(strategy))


def test_a_strategy_that_cannot_run_is_refused() -> None:
    with pytest.raises(PiperError, match="has no device"):
        piper.draw(net(), functional.mse_loss, [piper.Split("MB", 4)], EXAMPLE)
