"""Random values of which those of the first microbatch are all on one side of a comparison.

`h * (x > 2).any()`: in most random batches, some number of each microbatch is above 2.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from piper.capture.trace.trials.comparisons import Comparisons
from piper.job.batch.compared_values import beside
from piper.job.batch.random_batches import drawn

SMALL, LARGE = 0.01, 100.0


def sided(
    seen: Tensor,
    shape: tuple[int, ...],
    is_large: bool,
    comparisons: Comparisons,
    generator: Generator,
) -> Tensor:
    """In the first half, all values are small, or all are large. The second half has both."""
    found = beside(seen, shape, comparisons, generator)
    if not seen.numel() or seen.is_complex():
        return found
    first = found[: len(found) // 2]
    if seen.dtype is torch.bool:
        first[:] = is_large
    elif seen.is_floating_point():
        numbers = drawn(seen, tuple(first.shape), generator)
        first[:] = away_from_zero(numbers) if is_large else SMALL * numbers
        found[len(first) :] *= spread(len(found) - len(first), found.dim()).to(found.dtype)
    elif int(seen.min()) >= 0:
        first[:] = end_of(seen, is_large, comparisons)
    return found


def away_from_zero(numbers: Tensor) -> Tensor:
    return LARGE * (numbers.abs() + 1) * torch.where(numbers < 0, -1, 1)


def spread(rows: int, dims: int) -> Tensor:
    """Rows of other sizes, so that some numbers are far from 0 and some are near.

    >>> spread(4, 2).flatten().tolist()
    [8.0, 1.0, 8.0, 1.0]
    """
    return torch.tensor([8.0, 1.0]).repeat(rows)[:rows].view(-1, *[1] * (dims - 1))


def end_of(seen: Tensor, is_large: bool, comparisons: Comparisons) -> int:
    """The smallest or the largest integer that was seen, and that no comparison names."""
    every = range(int(seen.min()), int(seen.max()) + 1)
    order = reversed(every) if is_large else iter(every)
    return next((one for one in order if one not in comparisons.constants), every[-is_large])


def one_constant(
    seen: Tensor, shape: tuple[int, ...], nth: int, comparisons: Comparisons, generator: Generator
) -> Tensor:
    """In the first half, all integers are one that the model compares with: padding, say. Every
    other time only the last columns are, as those of short texts."""
    found = beside(seen, shape, comparisons, generator)
    if fits := constants_of(seen, comparisons):
        whole, (which, columns) = found[: len(found) // 2], divmod(nth, 2)
        part = whole[..., (whole.shape[-1] + 1) // 2 :] if columns and whole.dim() > 1 else whole
        part[:] = fits[which % len(fits)]
    return found


def constants_of(seen: Tensor, comparisons: Comparisons) -> list[int]:
    """Integers that the model compares with and that these may be. Padding may come later."""
    if seen.is_floating_point() or seen.is_complex() or seen.dtype is torch.bool:
        return []
    if not seen.numel() or int(seen.min()) < 0:
        return []
    whole = (int(one) for one in comparisons.constants if one % 1 == 0)
    return [one for one in whole if 0 <= one <= int(seen.max())]


def marked(
    seen: Tensor, shape: tuple[int, ...], nth: int, comparisons: Comparisons, generator: Generator
) -> Tensor:
    """Some values are one that a loss leaves out: NaN, or an integer that no class has.

    There are several in the first half, and at most one in the second: shares must differ.

    >>> comparisons, draw = Comparisons(ignored={9: None}), torch.Generator().manual_seed(0)
    >>> marked(torch.tensor([1]), (8,), 0, comparisons, draw).tolist()
    [9, 9, 9, 1, 1, 9, 1, 1]
    """
    found = drawn(seen, shape, generator)
    if not (marks := marks_of(seen, comparisons)):
        return found
    first, second = torch.zeros(shape, dtype=torch.bool).chunk(2)
    first.copy_(torch.rand(first.shape, generator=generator) < 0.4)
    first.view(-1)[: 2 if first.numel() > 2 else 1] = True
    first.view(-1)[1:][-1:] = False  # a mean over none of them is no number
    second.view(-1)[1:][: second.numel() > 2] = True
    return found.masked_fill(torch.cat([first, second]), marks[nth % len(marks)])


def marks_of(seen: Tensor, comparisons: Comparisons) -> list[float]:
    if not seen.numel() or seen.is_complex() or seen.dtype is torch.bool:
        return []
    if seen.is_floating_point():
        return [float("nan"), float("inf")] if comparisons.missing else []
    high = int(seen.max())
    whole = [int(one) for one in comparisons.constants if one % 1 == 0]
    near = [one + by for by in (0, 1, -1) for one in whole if not 0 <= one + by <= high]
    return [*dict.fromkeys([*comparisons.ignored, *near])]
