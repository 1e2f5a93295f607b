"""Random values on both sides of those that a model compares with."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from piper.capture.trace.trials.comparisons import Comparisons
from piper.job.batch.random_batches import drawn


def beside(
    seen: Tensor, shape: tuple[int, ...], comparisons: Comparisons, generator: Generator
) -> Tensor:
    """In some rows, some values are those, or beside them. The others are like those seen."""
    found = drawn(seen, shape, generator)
    if not seen.numel() or seen.is_complex() or seen.dtype is torch.bool:
        return found
    if seen.is_floating_point():
        others = numbers(shape, comparisons, generator)
    else:
        others = integers(seen, shape, comparisons, generator)
    if others is None:
        return found
    rows = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) < 0.6
    some = rows & (torch.rand(shape, generator=generator) < 0.5)
    return torch.where(some, others.to(seen.dtype), found)


def numbers(
    shape: tuple[int, ...], comparisons: Comparisons, generator: Generator
) -> Tensor | None:
    """Half of them are constants of the model. Others are on their sides."""
    if not comparisons.constants:
        return None
    every = torch.tensor([*comparisons.constants], dtype=torch.float64)
    each = every[torch.randint(len(every), shape, generator=generator)]
    apart = torch.randn(shape, generator=generator, dtype=torch.float64)
    apart *= torch.rand(shape, generator=generator) < 0.5
    return each + (each.abs() + 1) * apart


def integers(
    seen: Tensor, shape: tuple[int, ...], comparisons: Comparisons, generator: Generator
) -> Tensor | None:
    """Constants of the model, those next to them, and the last of a table, as far as tables go.

    Negative ones are ignored labels, and only those of the example are known to be.
    """
    low, high = int(seen.min()), int(seen.max())
    ends = [size - 1 for size in comparisons.tables if size > high]
    whole = [int(one) + by for one in comparisons.constants for by in (0, 1, -1) if one % 1 == 0]
    some = {*whole, *ends}
    kept = [one for one in sorted(some) if 0 <= one <= min(ends, default=one)]
    if not kept or low < 0:
        return None
    return torch.tensor(kept)[torch.randint(len(kept), shape, generator=generator)]
