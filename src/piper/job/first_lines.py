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
    yield from coarse_lines(captured.coarse_loss)


def coarse_lines(kind: str) -> Iterator[str]:
    """Classifiers of Hugging Face do so. Its language models compute their loss in float32."""
    if kind:
        yield (
            f"the model computes its own loss in {kind}; for a loss in float32, compute it from "
            "logits.float() in the model, or give a loss_fn(output, labels) that does"
        )
