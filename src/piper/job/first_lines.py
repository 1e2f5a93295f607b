"""What is said of the first program of a job: what was chosen for the user, and what was found."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from piper.capture import Captured
from piper.directives import Strategy
from piper.job.compile.compiler import Compiled
from piper.job.compile.stage_weights import stage_lines
from piper.job.compile.whole_model import whole_model_lines
from piper.job.loss.loss_reduction import LossReduction
from piper.job.memory.elementwise_choice import chosen_lines
from piper.job.memory.memory_limit import MemoryLimit


def first_lines(
    model: torch.nn.Module,
    strategy: Strategy,
    captured: Captured,
    compiled: Compiled,
    memory: MemoryLimit | None,
    reduction: LossReduction,
) -> Iterator[str]:
    yield from frozen_lines(model)
    yield from stage_lines(compiled)
    yield from chosen_lines(strategy.directives, compiled, memory)
    yield from reduction.lines()
    yield from whole_model_lines(strategy, captured)
    yield from coarse_lines(captured.coarse_loss)


def frozen_lines(model: torch.nn.Module) -> Iterator[str]:
    """
    >>> net = torch.nn.Linear(100, 20)
    >>> _ = net.weight.requires_grad_(False)
    >>> [*frozen_lines(net)], [*frozen_lines(torch.nn.Linear(2, 2))]
    (['20 of 2,020 parameters are trained (0.99 %), the others are frozen'], [])
    """
    trained, known = trained_parameters(model)
    if trained < known:
        share = f"{100 * trained / known:.3g} %"
        yield f"{trained:,} of {known:,} parameters are trained ({share}), the others are frozen"


def trained_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """How many are trained, and how many there are. Tied ones count once."""
    sizes = [(one.numel(), one.requires_grad) for one in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def coarse_lines(kind: str) -> Iterator[str]:
    """Classifiers of Hugging Face do so. Its language models compute their loss in float32."""
    if kind:
        yield (
            f"the model computes its own loss in {kind}; for a loss in float32, compute it from "
            "logits.float() in the model, or give a loss_fn(output, labels) that does"
        )
