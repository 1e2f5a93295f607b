"""What an optimizer keeps outside of `state` is in no checkpoint, and does not move to others."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch

from piper.runtime.optimizers.known_optimizers import MakeOptimizer, is_known
from piper.runtime.optimizers.small_parameters import (
    Kind,
    Parameters,
    close,
    fitting,
    made,
    set_gradients,
)

BEFORE, AFTER = 3, 12  # steps before and after another optimizer goes on
OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


def lost_state(make: MakeOptimizer, kinds: Sequence[Kind]) -> str | None:
    """What would be lost in an optimizer that goes on with `state` alone; None: nothing matters.

    If it cannot be tried on small parameters, assume that nothing does.
    """
    try:
        kinds = fitting(make, kinds)
        first, parameters = made(make, kinds)
        if is_known(first):
            return None
        train(first, parameters, range(BEFORE))
        other, others = made(make, kinds)
        resume(other, others, first, parameters)
        names = changed(first, other)
        for one, its in ((first, parameters), (other, others)):
            train(one, its, range(BEFORE, BEFORE + AFTER))
    except Exception:  # whatever a user's optimizer raises
        return None
    pairs = zip(parameters, others, strict=True)
    return None if all(close(a, b) for a, b in pairs) else names


def train(optimizer: torch.optim.Optimizer, parameters: Parameters, steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


def resume(
    new: torch.optim.Optimizer, own: Parameters, old: torch.optim.Optimizer, others: Parameters
) -> None:
    """As after `resume`: parameters, their state, and the options that the function gives."""
    for mine, other in zip(own, others, strict=True):
        mine.data.copy_(other.data)
        if other in old.state:
            new.state[mine] = deepcopy(old.state[other])


def changed(first: torch.optim.Optimizer, other: torch.optim.Optimizer) -> str:
    """The names of attributes that differ, as far as they are known."""
    before = vars(other)
    names = [
        name
        for name, value in vars(first).items()
        if not (name in OF_TORCH or callable(value)) and repr(value) != repr(before.get(name))
    ]
    return ", ".join(f"self.{name}" for name in names) or "variables of its own"
