"""Dropout from a counter: the same masks for the same samples under every strategy.

A mask is a function of the seed, the number of the dropout in the model, and the position of each
element in the global batch. There is no generator state. Only integer arithmetic below 2**63 is
used, so that every device gives the same bits.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

# Where a tensor has the rows of the batch: a dimension, and in how many groups of all rows. If all
# rows at one time are followed by all rows at the next, there are as many groups as times.
Rows = Sequence[int]
FIRST = (0, 1)

_LOW = 0xFFFFFFFF
_ROUNDS = (0x7FEB352D, 0x45D9F3B3, 0x2C1B3C6D)  # odd and below 2**31: no product overflows
_KEYS = (  # odd and below 2**29: no sum of three products overflows
    (0x1B873593, 0x0CC9E2D5, 0x165667B1),
    (0x1E3779B9, 0x13C6EF37, 0x05EBCA6B),
)


def dropout_mask(
    random: Tensor,
    operation: int | Tensor,
    shape: Sequence[int],
    p: float,
    rows: Rows = FIRST,
) -> Tensor:
    """Which elements the model's dropout number `operation` keeps, as booleans.

    `random` holds the seed, what comes before the microbatch, and its size in the same unit: rows,
    or microbatches. So row r of the microbatch has the same mask for any number of microbatches.
    """
    return noise_of(random, operation, shape, rows) >= _threshold(p)


def noise_of(
    random: Tensor, operation: int | Tensor, shape: Sequence[int], rows: Rows = FIRST
) -> Tensor:
    """Random numbers of 32 bits, one for each element."""
    dim, groups = rows
    count = shape[dim] // groups if shape else 1
    before, after = prod(shape[:dim]) * groups, prod(shape[dim + 1 :])
    row = torch.arange(count, device=random.device)
    column = torch.arange(before * after, device=random.device)
    found = noise(random, operation, count, row, column)
    return found.reshape(count, before, after).transpose(0, 1).reshape(shape)


def _threshold(p: float) -> int:
    return round(p * 2**32)


def piece_mask(
    random: Tensor,
    operation: int | Tensor,
    whole: Sequence[int],
    p: float,
    cut: Sequence[int],
    rank: Tensor,
    rows: Rows = FIRST,
) -> Tensor:
    """The part of `dropout_mask` for one device's piece of a tensor.

    `cut`: the dimension, its number of blocks, the devices that each block is cut for, and whether
    they have its pieces in zigzag order.
    """
    (dim, _, ways, _), (of_rows, groups) = cut, rows
    if groups > 1:  # a cut may end inside of one
        return _piece(dropout_mask(random, operation, whole, p, rows), cut, rank)
    if of_rows:
        others = [size for d, size in enumerate(whole) if d != of_rows]
        moved = 0 if dim == of_rows else dim + (dim < of_rows)
        given = random, operation, [whole[of_rows], *others], p, (moved, *cut[1:]), rank
        return piece_mask(*given).movedim(0, of_rows).contiguous()
    row = torch.arange(whole[0], device=random.device)
    column = torch.arange(prod(whole[1:]), device=random.device).reshape(whole[1:])
    if dim == 0:
        row = _piece(row, cut, rank)
    else:
        column = _piece(column, (dim - 1, *cut[1:]), rank)
    shape = [size // ways if d == dim else size for d, size in enumerate(whole)]
    found = noise(random, operation, whole[0], row, column.flatten())
    return (found >= _threshold(p)).reshape(shape)


def _piece(index: Tensor, cut: Sequence[int], rank: Tensor) -> Tensor:
    dim, blocks, ways, zigzag = cut
    split = index.unflatten(dim, (blocks, 2 * ways if zigzag else ways, -1))
    mine = torch.stack([rank, 2 * ways - 1 - rank]) if zigzag else rank.reshape(1)
    return split.index_select(dim + 1, mine).flatten(dim, dim + 2)


def noise(
    random: Tensor, operation: int | Tensor, rows: int, row: Tensor, column: Tensor
) -> Tensor:
    """[row, column]: random numbers of 32 bits."""
    seed, before, size = random.unbind()
    seed = (seed ^ (seed >> 32)) & _LOW
    row = before * rows // size + row
    found = column.unsqueeze(0)
    for (a, b, c), multiplier in zip(_KEYS, _ROUNDS[:2], strict=True):
        key = _scrambled(seed * a + operation * b + row * c, multiplier)
        found = _scrambled(found ^ key.unsqueeze(1), multiplier)
    return _scrambled(found, _ROUNDS[2])


def seed_of(seed: Tensor, row: Tensor) -> Tensor:
    """A seed for one row of the whole batch."""
    seed = (seed ^ (seed >> 32)) & _LOW
    return _scrambled(seed ^ _scrambled(row + 1, _ROUNDS[0]), _ROUNDS[1])


def _scrambled(x: Tensor, multiplier: int) -> Tensor:
    """One round of a mixing hash: a bijection of 32-bit numbers."""
    x = ((x & _LOW) * multiplier) & _LOW
    return x ^ (x >> 15)


# `random` of these operators also holds a number to add to `operation`, so that equal regions share
# their code. The mask is one operator instead of the 40 inside it, which keeps traces small.
_library = torch.library.Library("piper", "FRAGMENT")
ROWS = "int[] rows=[0, 1]"
_library.define(f"dropout(Tensor x, Tensor random, int operation, float p, {ROWS}) -> Tensor")
_library.define(f"keep(Tensor random, int operation, SymInt[] shape, float p, {ROWS}) -> Tensor")
# The same for one device's piece of a tensor of shape `whole`; `cut` as in `piece_mask`.
_PIECE = f"int[] whole, int[] cut, Tensor rank, {ROWS}"
_library.define(
    f"divided_dropout(Tensor x, Tensor random, int operation, float p, {_PIECE}) -> Tensor"
)
_library.define(f"keep_piece(Tensor random, int operation, float p, {_PIECE}) -> Tensor")

DROPOUT = torch.ops.piper.dropout.default
KEEP = torch.ops.piper.keep.default
DIVIDED_DROPOUT = torch.ops.piper.divided_dropout.default
KEEP_PIECE = torch.ops.piper.keep_piece.default
DROPOUTS = (DROPOUT, DIVIDED_DROPOUT)


def keep(
    random: Tensor, operation: int, shape: Sequence[int], p: float, rows: Rows = FIRST
) -> Tensor:
    return dropout_mask(random[:3], random[3] + operation, shape, p, rows)


def keep_piece(
    random: Tensor,
    operation: int,
    p: float,
    whole: Sequence[int],
    cut: Sequence[int],
    rank: Tensor,
    rows: Rows = FIRST,
) -> Tensor:
    return piece_mask(random[:3], random[3] + operation, whole, p, cut, rank, rows)


def _dropout(x: Tensor, random: Tensor, operation: int, p: float, rows: Rows = FIRST) -> Tensor:
    """Kept elements are scaled so that the mean stays the same."""
    if p >= 1.0:
        return x * 0.0
    return x * KEEP(random, operation, x.shape, p, rows) * (1.0 / (1.0 - p))


def _divided_dropout(
    x: Tensor,
    random: Tensor,
    operation: int,
    p: float,
    whole: Sequence[int],
    cut: Sequence[int],
    rank: Tensor,
    rows: Rows = FIRST,
) -> Tensor:
    if p >= 1.0:
        return x * 0.0
    kept = KEEP_PIECE(random, operation, p, whole, cut, rank, rows)
    return x * kept * (1.0 / (1.0 - p))


def _keep_fake(
    random: Tensor, operation: int, shape: Sequence[int], p: float, rows: Rows = FIRST
) -> Tensor:
    return random.new_empty(shape, dtype=torch.bool)


def _keep_piece_fake(
    random: Tensor,
    operation: int,
    p: float,
    whole: Sequence[int],
    cut: Sequence[int],
    rank: Tensor,
    rows: Rows = FIRST,
) -> Tensor:
    shape = [size // cut[2] if d == cut[0] else size for d, size in enumerate(whole)]
    return random.new_empty(shape, dtype=torch.bool)


_library.impl("dropout", _dropout, "CompositeImplicitAutograd")
_library.impl("keep", keep, "CompositeExplicitAutograd")
_library.impl("keep", _keep_fake, "Meta")
_library.impl("divided_dropout", _divided_dropout, "CompositeImplicitAutograd")
_library.impl("keep_piece", keep_piece, "CompositeExplicitAutograd")
_library.impl("keep_piece", _keep_piece_fake, "Meta")

INSIDE: dict[Any, Callable[..., Tensor]] = {
    KEEP: keep,
    KEEP_PIECE: keep_piece,
}  # what a compiler sees in place of the operators
