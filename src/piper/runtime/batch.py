"""The inputs of a program for one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piper.plan.instructions import Load


@dataclass
class StepInputs:
    """The inputs of this replica on its device, and the weights of its microbatches."""

    inputs: tuple[torch.Tensor, ...]
    weights: tuple[
        float, ...
    ]  # of each microbatch in the loss; for a mean, their sum over all replicas is 1
    seed: int = 0
    max_norm: float | None = None
    first: int = 0  # number of its first microbatch among those of all replicas
    first_row: int | None = None  # of its first row, if replicas have different numbers of rows
    scale: float = 1.0  # of the loss, for its gradients
    only_finite: bool = False  # no update if the loss or the norm is not finite
    whole: frozenset[int] = frozenset()  # inputs that every microbatch gets as they are
    names: tuple[str, ...] = ()  # of the inputs, as the user calls them

    def allows(self, totals: torch.Tensor) -> bool:
        """Whether parameters may be updated."""
        return not self.only_finite or bool(totals.isfinite().all())

    def loaded(self, load: Load, loss_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if load.role == "batch":
            if load.index in self.whole:
                return self.inputs[load.index]
            return part_of(self.inputs[load.index], load.part, load.parts, load.sizes)
        if load.role == "seed":
            weight = self.scale * self.weights[load.part]
            return torch.full((), weight, dtype=loss_dtype, device=device)
        if load.role == "rank":
            return torch.full((), load.index, dtype=torch.int64, device=device)
        if load.role == "control":
            return torch.zeros((), dtype=torch.int64, device=device)
        if self.first_row is None:
            counter = [self.seed, *position(self.first + load.part, load.sizes)]
        else:
            row, size = position(load.part, load.sizes)
            counter = [self.seed, self.first_row + row, size]
        return torch.tensor(counter).to(device, non_blocking=True)  # does not wait for the GPU


def part_of(
    tensor: torch.Tensor, part: int, parts: int, sizes: tuple[int, ...] = ()
) -> torch.Tensor:
    """The samples of one microbatch. A tensor without dimensions is the same for all.

    `sizes` are the rows of the microbatches of each replica, if they differ.
    """
    if tensor.dim() == 0:
        return tensor
    if sizes:
        first, size = position(part, sizes)
        return tensor.narrow(0, first, size).contiguous()
    size = tensor.shape[0] // parts
    return tensor.narrow(0, part * size, size).contiguous()


def position(part: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The first row of a microbatch among those of all replicas, and how many it has. If all have
    equally many: how many microbatches come before it, and 1.

    >>> position(5, (3, 3, 2)), position(5, ())
    ((14, 2), (5, 1))
    """
    if not sizes:
        return part, 1
    replica, k = divmod(part, len(sizes))
    return replica * sum(sizes) + sum(sizes[:k]), sizes[k]
