"""Draw what a strategy makes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piper.directives import Strategy
from piper.job.arguments import given_strategy, names_options
from piper.job.inspection import inspected
from piper.job.job import Job
from piper.job.options import Loss
from piper.strategies.timing import compiled_rows
from piper.view.schedule_grid import grid


@names_options
def draw(
    model: torch.nn.Module,
    loss_fn: Loss | None,
    strategy: Strategy | Sequence[Any] | None,
    example: Any,
) -> str:
    """The schedule of a strategy over time, with a line for each device, as `piper show` draws it.

    It compiles and checks what a Trainer with these arguments would, and runs nothing.
    """
    job = Job(model, loss_fn, given_strategy(strategy))
    found = inspected(job, job.example(example))
    return grid(compiled_rows(job.strategy, found.compiled.dag))
