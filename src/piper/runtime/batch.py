"""What a program is given for one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class StepInputs:
    """This replica's inputs on its device, and what each microbatch weighs."""

    inputs: tuple[torch.Tensor, ...]
    weights: tuple[float, ...]  # of each microbatch in the loss; they add up to 1 for a mean
    seed: int = 0
    max_norm: float | None = None
    first: int = 0  # number of its first microbatch among those of all replicas


def part_of(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """One microbatch's rows; a tensor without rows is whole for every microbatch."""
    if tensor.dim() == 0:
        return tensor
    rows = tensor.shape[0] // parts
    return tensor.narrow(0, part * rows, rows).contiguous()
