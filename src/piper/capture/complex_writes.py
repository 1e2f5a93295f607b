"""Writes to a part of a complex tensor, as Fourier models make them: `out[..., :modes] = y`.

A trace makes them functions, of which torch has no derivative for complex numbers. So they are
traced as writes of the real numbers that these consist of.
"""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def slice_scatter(
    self: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Tensor:
    return _as_real(aten.slice_scatter.default, self, src, dim % self.dim(), start, end, step)


def select_scatter(self: Tensor, src: Tensor, dim: int, index: Any) -> Tensor:
    return _as_real(aten.select_scatter.default, self, src, dim % self.dim(), index)


def diagonal_scatter(
    self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """The diagonal comes last, and the pairs of real numbers before it."""

    def write(pairs: Tensor, values: Tensor, *dims: int) -> Tensor:
        return aten.diagonal_scatter.default(pairs, values.transpose(-1, -2), offset, *dims)

    return _as_real(write, self, src, dim1 % self.dim(), dim2 % self.dim())


INSTEAD = {
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.diagonal_scatter.default: diagonal_scatter,
}


def _as_real(write: Any, self: Tensor, src: Tensor, *rest: Any) -> Tensor:
    if not self.is_complex():
        return NotImplemented
    found: Tensor = torch.view_as_complex(write(_pairs(self), _pairs(src), *rest))
    return found


def _pairs(one: Tensor) -> Tensor:
    return torch.view_as_real(one.resolve_conj())
