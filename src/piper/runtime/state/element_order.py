"""The order of a tensor's elements in which what each device holds of it is contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piper.runtime.processes.wire_format import travels


@travels
@dataclass(frozen=True, slots=True)
class ElementOrder:
    """A dimension is `blocks` blocks, each cut in `ways` pieces: first come all first pieces.

    >>> ElementOrder(1, 1, 2).flat(torch.arange(8).view(2, 4)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """

    dim: int = 0
    blocks: int = 1
    ways: int = 1

    @property
    def is_natural(self) -> bool:
        """Whether it is the order in memory."""
        return self.ways == 1 or (self.dim == 0 and self.blocks == 1)

    def flat(self, whole: torch.Tensor) -> torch.Tensor:
        """All elements in this order."""
        if self.is_natural:
            return whole.reshape(-1)
        cut = whole.unflatten(self.dim, (self.blocks, self.ways, -1))
        return cut.movedim(self.dim + 1, 0).reshape(-1)

    def whole(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of this shape whose elements are in this order."""
        if self.is_natural:
            return flat.view(tuple(shape))
        size = shape[self.dim] // (self.blocks * self.ways)
        before, after = shape[: self.dim], shape[self.dim + 1 :]
        cut = flat.view(self.ways, *before, self.blocks, size, *after)
        return cut.movedim(0, self.dim + 1).reshape(tuple(shape))

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what one device holds."""
        return (*shape[: self.dim], shape[self.dim] // self.ways, *shape[self.dim + 1 :])

    def indices(self, shape: Sequence[int]) -> torch.Tensor:
        """Where each element is in memory, in this order."""
        return self.flat(torch.arange(torch.Size(shape).numel()).view(tuple(shape)))

    def __str__(self) -> str:
        return "" if self.is_natural else f"@{self.dim}.{self.blocks}.{self.ways}"


NATURAL = ElementOrder()
