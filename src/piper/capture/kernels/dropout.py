"""Dropout from a counter: the same masks for the same samples under every strategy.

A mask is a function of the seed, the number of the dropout in the model, and the position of each
element in the global batch. There is no generator state. Only integer arithmetic below 2**63 is
used, so that every device gives the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_ROUNDS = (0x7FEB352D, 0x45D9F3B3, 0x2C1B3C6D)  # odd and below 2**31: no product overflows
_KEYS = (  # odd and below 2**29: no sum of three products overflows
    (0x1B873593, 0x0CC9E2D5, 0x165667B1),
    (0x1E3779B9, 0x13C6EF37, 0x05EBCA6B),
)


def dropout_mask(random: Tensor, operation: int | Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Which elements the model's dropout number `operation` keeps, as booleans.

    `random` holds the seed and the microbatch. Row r of microbatch m is row m * shape[0] + r of
    the batch, so the mask does not depend on the number of microbatches.
    """
    rows, columns = (shape[0] if shape else 1), 1
    for size in shape[1:]:
        columns = columns * size
    seed, microbatch = random.unbind()
    seed = (seed ^ (seed >> 32)) & _LOW
    row = microbatch * rows + torch.arange(rows, device=random.device)
    noise = torch.arange(columns, device=random.device).unsqueeze(0)
    for (a, b, c), multiplier in zip(_KEYS, _ROUNDS[:2], strict=True):
        key = _scrambled(seed * a + operation * b + row * c, multiplier)
        noise = _scrambled(noise ^ key.unsqueeze(1), multiplier)
    noise = _scrambled(noise, _ROUNDS[2])
    return (noise >= round(p * 2**32)).reshape(shape)


def _scrambled(x: Tensor, multiplier: int) -> Tensor:
    """One round of a mixing hash: a bijection of 32-bit numbers."""
    x = ((x & _LOW) * multiplier) & _LOW
    return x ^ (x >> 15)


# `random` of these operators also holds a number to add to `operation`, so that equal regions share
# their code. The mask is one operator instead of the 40 inside it, which keeps traces small.
_library = torch.library.Library("piper", "FRAGMENT")
_library.define("dropout(Tensor x, Tensor random, int operation, float p) -> Tensor")
_library.define("keep(Tensor random, int operation, SymInt[] shape, float p) -> Tensor")

DROPOUT = torch.ops.piper.dropout.default
KEEP = torch.ops.piper.keep.default


def keep(random: Tensor, operation: int, shape: Sequence[int], p: float) -> Tensor:
    return dropout_mask(random[:2], random[2] + operation, shape, p)


def _dropout(x: Tensor, random: Tensor, operation: int, p: float) -> Tensor:
    """Kept elements are scaled so that the mean stays the same."""
    if p >= 1.0:
        return x * 0.0
    return x * KEEP(random, operation, x.shape, p) * (1.0 / (1.0 - p))


def _keep_fake(random: Tensor, operation: int, shape: Sequence[int], p: float) -> Tensor:
    return random.new_empty(shape, dtype=torch.bool)


_library.impl("dropout", _dropout, "CompositeImplicitAutograd")
_library.impl("keep", keep, "CompositeExplicitAutograd")
_library.impl("keep", _keep_fake, "Meta")
