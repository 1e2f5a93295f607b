"""Dropout from a counter: the same masks for the same samples under every strategy.

A mask is a function of the seed, of which dropout of the model it is, and of the position of
each element in the whole batch; no generator has a state. Only integer arithmetic below 2**63
is used, so that every device gives the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0x7FEB352D, 0x45D9F3B3, 0x2C1B3C6D)  # odd and below 2**31: no product overflows


def dropout_mask(random: Tensor, operation: int | Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Which elements the model's dropout number `operation` keeps, as booleans.

    `random` holds the seed and the microbatch. Row r of microbatch m is row m * shape[0] + r of
    the batch, so the number of microbatches makes no difference.
    """
    rows, columns = (shape[0] if shape else 1), 1
    for size in shape[1:]:
        columns = columns * size
    seed, microbatch = random.unbind()
    row = microbatch * rows + torch.arange(rows, device=random.device)
    keys = [_key(row, seed, operation, salt) for salt in range(len(_MULTIPLIERS))]
    noise = torch.arange(columns, device=random.device).unsqueeze(0)
    for key, multiplier in zip(keys, _MULTIPLIERS, strict=True):
        noise = _scrambled(noise ^ key.unsqueeze(1), multiplier)
    return (noise >= round(p * 2**32)).reshape(shape)


def dropout(x: Tensor, random: Tensor, operation: int, p: float) -> Tensor:
    """`x` with a mask; what is kept is scaled so that the mean stays.

    `random` also holds a number to add to `operation`: equal regions then share their code.
    """
    if p >= 1.0:
        return x * 0.0
    mask = dropout_mask(random[:2], random[2] + operation, x.shape, p)
    return x * mask * (1.0 / (1.0 - p))


def _key(row: Tensor, seed: Tensor, operation: int | Tensor, salt: int) -> Tensor:
    """A number per row that no other row, seed, operation or salt shares, but by chance."""
    key = row & _LOW
    for part in (row >> 32, seed, seed >> 32, operation, operation + salt):
        for multiplier in _MULTIPLIERS:
            key = _scrambled(key ^ (part & _LOW), multiplier)
    return key


def _scrambled(x: Tensor, multiplier: int) -> Tensor:
    """One round of a mixing hash: a bijection of 32-bit numbers."""
    x = (x * multiplier) & _LOW
    return x ^ (x >> 15)


_library = torch.library.Library("piper", "FRAGMENT")
_library.define("dropout(Tensor x, Tensor random, int operation, float p) -> Tensor")
_library.impl("dropout", dropout, "CompositeImplicitAutograd")

DROPOUT = torch.ops.piper.dropout.default
