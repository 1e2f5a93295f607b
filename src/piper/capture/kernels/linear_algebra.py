"""Operators of linear algebra that do not check values: they give NaN where torch raises.

The check is a side effect, which the derivative of a graph cannot have.
"""

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("piper", "FRAGMENT")
aten = torch.ops.aten


def _where_valid(found: Tensor, info: Tensor) -> Tensor:
    failed = (info != 0).reshape(*info.shape, *[1] * (found.dim() - info.dim()))
    return found.masked_fill(failed, float("nan"))


def _inverse(x: Tensor) -> Tensor:
    return _where_valid(*torch.linalg.inv_ex(x))


def _solve(x: Tensor, other: Tensor, left: bool) -> Tensor:
    return _where_valid(*torch.linalg.solve_ex(x, other, left=left))


def _cholesky(x: Tensor, upper: bool) -> Tensor:
    return _where_valid(*torch.linalg.cholesky_ex(x, upper=upper))


def _lu_factor(x: Tensor, pivot: bool) -> tuple[Tensor, Tensor]:
    factors, pivots, info = torch.linalg.lu_factor_ex(x, pivot=pivot)
    return _where_valid(factors, info), pivots


def _defined(schema: str, function: Any, result: str = "Tensor") -> Any:
    name = schema.partition("(")[0]
    _library.define(f"{schema} -> {result}")
    _library.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.piper, name).default


INVERSE = _defined("inverse(Tensor x)", _inverse)
SOLVE = _defined("solve(Tensor x, Tensor other, bool left)", _solve)
CHOLESKY = _defined("cholesky(Tensor x, bool upper)", _cholesky)
LU_FACTOR = _defined("lu_factor(Tensor x, bool pivot)", _lu_factor, "(Tensor, Tensor)")
WITHOUT_CHECK: dict[Any, Any] = {  # operators of torch, with the same arguments in the same order
    aten.linalg_inv.default: INVERSE,
    aten.inverse.default: INVERSE,
    aten.linalg_solve.default: SOLVE,
    aten.linalg_cholesky.default: CHOLESKY,
    aten.cholesky.default: CHOLESKY,
    aten.linalg_lu_factor.default: LU_FACTOR,
}
