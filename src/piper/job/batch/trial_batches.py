"""Random microbatches for a trial: like those of a script, and like others that may come later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from itertools import count

import torch
from torch import Generator, Tensor

from piper.capture.trace.trials.comparisons import Comparisons
from piper.job.batch.batch import Batch
from piper.job.batch.compared_values import beside
from piper.job.batch.random_batches import drawn, like_columns, rows_of
from piper.job.batch.sided_values import constants_of, marked, marks_of, one_constant, sided

SCALES = torch.tensor([-100.0, -8.0, 0.01, 1.0, 8.0, 100.0], dtype=torch.float64)
NEARLY = 1e-3
NEAR = SCALES[[4, 1]]  # after `tanh`, 8 is still another number than 9


class Variety(IntEnum):
    """How far random values are from those of the first batch, which may be special: without
    padding, say. A model may fail on some of them, so the next ones are nearer to what it has seen.
    """

    ROWS = 0  # rows of the first batch itself
    COLUMNS = 1  # integers of each column from its own range, as those of a table are
    SEEN = 2  # from the range of all columns
    VARIED = 3  # also integers of which the example has only one
    FREE = 4  # also masks with holes, and integers from 0 on, some of them in both microbatches
    WIDE = 5  # also numbers of other sizes and signs
    APART = 6  # only the second microbatch has any of these: a guard may hold in one of them
    COMPARED = 7  # values on both sides of those that the model compares with
    ALIKE = 8  # the second microbatch has nearly one token of the first everywhere
    EQUAL = 9  # all rows and tokens of both are nearly one
    SMALL = 10  # all values of the first microbatch are on one side of what a model compares with
    LARGE = 11  # on the other side
    CONSTANT = 12  # all integers of the first microbatch are one that the model compares with
    MARKED = 13  # one tensor has values that a loss leaves out


def pairs_like(
    one: Batch, rows: int, most: Variety, seed: int, comparisons: Comparisons
) -> Iterator[Batch]:
    """Twice so many rows, at random: the most various ones first, each once."""
    before: list[Batch] = []
    for variety in range(most, -1, -1):
        pair = two_like(one, rows, Variety(variety), seed, comparisons)
        if not any(same(pair, other) for other in before):
            before.append(pair)
            yield pair


def has_special(one: Batch, variety: Variety, nth: int, comparisons: Comparisons) -> bool:
    """Whether there is such a batch: others show nothing more."""
    if variety not in (Variety.CONSTANT, Variety.MARKED):
        return replace(comparisons, tables={}, ignored={}) != Comparisons()
    cut = [t for k, t in enumerate(one.tensors) if k not in one.whole and t.dim()]
    if variety == Variety.CONSTANT:
        return any(nth < 2 * len(constants_of(tensor, comparisons)) for tensor in cut)
    place, which = nth % len(one.tensors), nth // len(one.tensors)
    return place < len(cut) and which < len(marks_of(cut[place], comparisons))


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


def two_like(one: Batch, rows: int, variety: Variety, seed: int, comparisons: Comparisons) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    if variety <= Variety.COLUMNS:
        nearest = like_columns if variety == Variety.COLUMNS else rows_of
        return nearest(one, 2 * rows, generator)

    position = count()

    def draw(seen: Tensor) -> Tensor:
        seen, shape, place = seen.detach().cpu(), (2 * rows, *seen.shape[1:]), next(position)
        given = comparisons, generator
        if variety in (Variety.SMALL, Variety.LARGE):
            return sided(seen, shape, variety == Variety.LARGE, *given)
        if variety == Variety.CONSTANT:
            return one_constant(seen, shape, seed, *given)
        if variety == Variety.MARKED:
            nth, chosen = divmod(seed, len(one.tensors))
            return (
                marked(seen, shape, nth, *given)
                if place == chosen
                else drawn(seen, shape, generator)
            )
        if variety == Variety.COMPARED and not is_mask(seen):
            return beside(seen, shape, comparisons, generator)
        if variety == Variety.FREE:
            return with_equal(random_like(seen, shape, variety, generator))
        if variety == Variety.EQUAL:
            return one_token(random_like(seen, shape, Variety.VARIED, generator))
        if variety == Variety.ALIKE:
            first = random_like(seen, shape, Variety.VARIED, generator)[:rows]
            return torch.cat([first, one_token(first)])
        if variety != Variety.APART:
            return random_like(seen, shape, variety, generator)
        first = random_like(seen, shape, Variety.SEEN, generator)
        return torch.cat([first[:rows], random_like(seen, shape, variety, generator)[rows:]])

    return one.change_rows(draw).map(lambda tensor: tensor.cpu())


def one_token(found: Tensor) -> Tensor:
    """Nearly the first token of the first row everywhere: all choose the same expert, say.

    Not quite, so that rounding does not decide their order. Of integers, the first row.

    >>> one_token(torch.tensor([[1, 2], [3, 4]])).tolist()
    [[1, 2], [1, 2]]
    """
    if found.dim() < 3 or not found.is_floating_point():
        return found[:1].expand_as(found).clone()
    return found[:1, :1] + NEARLY * found


def with_equal(found: Tensor) -> Tensor:
    """Every other integer of the second microbatch is one of the first: rows may belong together
    that have the same label, or are of one user or query, and random ones hardly ever do.

    >>> with_equal(torch.tensor([10, 20, 30, 40, 50, 60])).tolist()
    [10, 20, 30, 30, 50, 20]
    """
    if found.is_floating_point() or found.is_complex() or found.dtype is torch.bool:
        return found
    first, second = found.chunk(2)
    again = torch.arange(len(found) // 2).view(-1, *[1] * (found.dim() - 1)) % 2 == 0
    return torch.cat([first, torch.where(again, first.roll(1, 0), second)])


def random_like(
    seen: Tensor, shape: tuple[int, ...], variety: Variety, generator: Generator
) -> Tensor:
    if not seen.numel() or seen.is_complex():
        return drawn(seen, shape, generator)
    if is_mask(seen) and variety >= Variety.FREE:
        return mask(shape, variety, generator).to(seen.dtype)
    if seen.is_floating_point() or seen.dtype is torch.bool:
        return numbers(seen, shape, variety, generator)
    return integers(seen, shape, variety, generator)


def is_mask(seen: Tensor) -> bool:
    """Also one of floating-point numbers."""
    bits = (seen == 0) | (seen == 1)
    return seen.dtype is torch.bool or (
        seen.is_floating_point() and bool(bits.all() and seen.any())
    )


def mask(shape: tuple[int, ...], variety: Variety, generator: Generator) -> Tensor:
    """Padded rows, or rows with holes. The first token counts, so that no row has none."""
    holes = torch.rand(shape, generator=generator) < 0.5
    if len(shape) == 1:
        return holes
    place, lengths = torch.arange(shape[-1]), (*shape[:-1], 1)
    if variety == Variety.WIDE:
        return holes | (place == 0)
    return place < torch.randint(1, shape[-1] + 1, lengths, generator=generator)


def integers(
    seen: Tensor, shape: tuple[int, ...], variety: Variety, generator: Generator
) -> Tensor:
    low, high, free = int(seen.min()), int(seen.max()), variety >= Variety.FREE
    if low < 0:  # ignored labels
        some = torch.tensor([low, 0], dtype=seen.dtype)
        return drawn(some if free and low == high else seen, shape, generator)
    more = low == high and variety in (Variety.VARIED, Variety.WIDE)
    found = torch.randint(0 if free else low, high + more + 1, shape, generator=generator)
    if free and low == high and len(shape) > 1:
        found[..., 0] = high  # as in a mask
    return found.to(seen.dtype)


def numbers(seen: Tensor, shape: tuple[int, ...], variety: Variety, generator: Generator) -> Tensor:
    found = drawn(seen, shape, generator)
    if variety < Variety.WIDE or not seen.is_floating_point():
        return found
    if variety == Variety.WIDE:  # a model may ask whether any number of its batch is missing
        found = torch.where(found.isfinite(), found, torch.zeros_like(found))
    half = (sizes(shape[0] // 2, variety, generator) for _ in range(2))
    each = torch.cat([*half]).view(-1, *[1] * (len(shape) - 1))
    near = torch.isin(each, NEAR)  # means of these rows are far from 0, too
    return (torch.where(near, found.abs(), found) * each).to(seen.dtype)


def sizes(rows: int, variety: Variety, generator: Generator) -> Tensor:
    """What to multiply each row of a microbatch with: as many different numbers as there are, and
    among several of them that which makes rows large."""
    if variety == Variety.APART:
        return NEAR.repeat(rows)[:rows]
    order = [torch.randperm(len(SCALES), generator=generator) for _ in range(rows)]
    found = SCALES[torch.cat(order)[:rows]]
    if rows > 1 and not (found == NEAR[0]).any():
        found[order[0][0] % rows] = NEAR[0]
    return found
