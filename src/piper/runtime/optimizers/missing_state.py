"""Whether one of torch's optimizers can go on with the state that a checkpoint has.

Options such as `amsgrad=True` keep more of it, and an optimizer that finds it missing fails in its
next step.
"""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature
from typing import Any

import torch

from piper.runtime.optimizers.known_optimizers import is_unchanged
from piper.runtime.optimizers.small_parameters import set_gradients


def missing_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], found: Collection[str], dims: int = 2
) -> list[str]:
    """What it keeps with these options for a parameter of so many dimensions, and cannot do
    without. Tried on a small one.

    >>> p = torch.nn.Parameter(torch.ones(2, 2))
    >>> made = torch.optim.AdamW([p], amsgrad=True)
    >>> missing_state(made, made.param_groups[0], ["step", "exp_avg", "exp_avg_sq"])
    ['max_exp_avg_sq']
    """
    if not found or not is_unchanged(optimizer):
        return []
    parameter = torch.nn.Parameter(torch.ones([2] * dims))
    known = signature(type(optimizer)).parameters
    options = {name: value for name, value in group.items() if name in known and name != "params"}
    try:
        made = type(optimizer)([parameter], **{**options, **on_cpu(options)})
        set_gradients([parameter], step=0)
        made.step()
    except Exception:  # whatever it is, it happens in a step as well
        return []
    state = made.state[parameter]
    missing = [name for name in state if name not in found]
    for name in missing:
        del state[name]
    try:
        made.step()
    except Exception:
        return missing
    return []


def on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Options of GPUs, as they are for a trial."""
    return {name: False for name in ("capturable", "fused") if options.get(name)}
