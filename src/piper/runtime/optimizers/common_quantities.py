"""Optimizers in which a parameter's update depends on others, perhaps only later or seldom.

Clipping by a common norm, a distance to the start that all parameters share (Prodigy), a step that
is skipped if any gradient is large: each bucket of parameters would have its own. So one parameter
gets gradients of many kinds, over many steps, and the update of another must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from piper.runtime.optimizers.known_optimizers import MakeOptimizer
from piper.runtime.optimizers.small_parameters import (
    Kind,
    Parameters,
    close,
    fitting,
    made,
    set_gradients,
)

Pattern = Callable[[int], float]  # from a step to what its gradient is multiplied by

STEPS, LATE = 16, 1000  # so many steps are done, and so many are skipped in between
DECAY = 0.5  # of the rate, from step to step
OTHERS: Sequence[Pattern] = (
    lambda step: 0.0,
    lambda step: 1e-6,
    lambda step: 1e6,
    lambda step: 1e6 * (-1) ** step,
    lambda step: float("nan"),
)
OWN: Sequence[Pattern] = (lambda step: 1.0, lambda step: 1e-3 * (-1) ** step)


def depend_on_each_other(make: MakeOptimizer, kinds: Sequence[Kind]) -> bool:
    """Whether gradients of the first of two parameters change the second one.

    If it cannot be tried on small ones, assume that they do not.
    """
    kinds = fitting(make, kinds)
    for own in OWN:
        found = [one for other in OTHERS if (one := path(make, kinds, other, own)) is not None]
        if any(not close(found[0], one) for one in found[1:]):
            return True
    return False


def path(
    make: MakeOptimizer, kinds: Sequence[Kind], other: Pattern, own: Pattern
) -> torch.Tensor | None:
    """The values of the second parameter after each step."""
    try:
        return torch.stack([*steps(*made(make, kinds), (other, own))])
    except Exception:  # whatever a user's optimizer raises
        return None


def steps(
    optimizer: torch.optim.Optimizer, parameters: Parameters, patterns: Sequence[Pattern]
) -> Iterator[torch.Tensor]:
    for step in range(STEPS):
        set_gradients(parameters, step=0)
        for one, pattern in zip(parameters, patterns, strict=True):
            assert one.grad is not None
            one.grad *= pattern(step)
        optimizer.step()
        yield parameters[1].detach().clone()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * DECAY
        if step == STEPS // 2:
            skip(optimizer, step + 1)


def skip(optimizer: torch.optim.Optimizer, done: int) -> None:
    """Let what counts steps count many more: something may begin late."""
    for holder in (vars(optimizer), *optimizer.param_groups, *optimizer.state.values()):
        for key, value in list(holder.items()):
            if is_count(value, done):
                holder[key] = value + LATE


def is_count(value: Any, done: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.item() == done
    return type(value) in (int, float) and value == done
