"""What is said of the first program of a job: what was chosen for the user, and what was found."""

from __future__ import annotations

from collections.abc import Iterator

from piper.capture import Captured
from piper.directives import Strategy
from piper.job.compile.compiler import Compiled
from piper.job.compile.stage_weights import stage_lines
from piper.job.compile.whole_model import whole_model_lines
from piper.job.loss.loss_reduction import LossReduction
from piper.job.memory.elementwise_choice import chosen_lines
from piper.job.memory.memory_limit import MemoryLimit


def first_lines(
    strategy: Strategy,
    captured: Captured,
    compiled: Compiled,
    memory: MemoryLimit | None,
    reduction: LossReduction,
) -> Iterator[str]:
    yield from stage_lines(compiled)
    yield from chosen_lines(strategy.directives, compiled, memory)
    yield from reduction.lines()
    yield from whole_model_lines(strategy, captured)
