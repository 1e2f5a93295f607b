"""Steps of an optimizer on some parameters after others, for less temporary memory.

torch's foreach kernels make temporary copies of all parameters of a call. Without CUDA graphs these
are in memory that activations have left. Graphs have a pool of their own, and then they add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from piper.runtime.optimizers.known_optimizers import is_elementwise
from piper.runtime.torch_private import bare_optimizer, has_own_step, note_step

PARTS = 4  # calls of torch.optim instead of one, about
LEAST = 16 * 2**20  # bytes of parameters that are worth a call


class Holder(Protocol):
    """A bucket with an optimizer."""

    optimizer: torch.optim.Optimizer | None
    in_parts: bool


def step(bucket: Holder) -> None:
    """Step the optimizer of a bucket. In parts, it gives the same bits."""
    optimizer = bucket.optimizer
    if optimizer is None:
        return
    if not (bucket.in_parts and makes_copies(optimizer)):
        optimizer.step()
        return
    stepper = bare_optimizer(optimizer)
    for group in parts(optimizer.param_groups, LEAST):
        stepper.param_groups = [group]
        stepper.step()
    note_step(optimizer)


def makes_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's that treat elements by themselves, with foreach kernels."""
    mine = is_elementwise(type(optimizer)) and not has_own_step(optimizer)
    return mine and all(map(is_foreach, optimizer.param_groups))


def is_foreach(group: dict[str, Any]) -> bool:
    """On GPUs they are torch's default."""
    if group.get("foreach") is None:
        return not group.get("fused") and all(one.is_cuda for one in group["params"])
    return bool(group["foreach"])


def parts(groups: Sequence[dict[str, Any]], least: int) -> Iterator[dict[str, Any]]:
    """The same groups, cut where their parameters exceed a size."""
    most = max(least, sum(p.nbytes for group in groups for p in group["params"]) // PARTS)
    for group in groups:
        some, size = list[torch.nn.Parameter](), 0
        for parameter in group["params"]:
            if some and size + parameter.nbytes > most:
                yield {**group, "params": some}
                some, size = [], 0
            some.append(parameter)
            size += parameter.nbytes
        if some:
            yield {**group, "params": some}
