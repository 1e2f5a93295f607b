"""Weights that trials use in place of those of a large model: windows over a few numbers.

A trial compares runs with the same weights, whichever these are. Rows and columns of a window
overlap in memory, so a matrix takes as much of it as a few of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from zlib import crc32

import torch
from torch import Tensor

SAVED = 4  # a window has so many times its numbers, or else it is not worth it


@dataclass(frozen=True, slots=True)
class Window:
    """The values of one parameter.

    >>> Window("w", (2, 3), torch.float32).values(None).stride()
    (3, 1)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Odd and different, so that no matrix is symmetric."""
        return tuple(2 * k - 1 for k in range(len(self.shape), 0, -1))

    @property
    def numbers(self) -> int:
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)

    @property
    def saves(self) -> bool:
        """Whether it takes much less memory than its parameter."""
        return len(self.shape) > 1 and SAVED * self.numbers <= prod(self.shape)

    def values(self, dtype: torch.dtype | None) -> Tensor:
        draw = torch.Generator().manual_seed(crc32(self.name.encode()))
        numbers = torch.randn(self.numbers, generator=draw).to(dtype or self.dtype)
        return (numbers / sqrt(max(self.shape[1:]))).as_strided(self.shape, self.strides)
