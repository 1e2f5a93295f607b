"""Functions of torch that ask for values in the middle, written without: covariances, choices."""

from itertools import combinations, combinations_with_replacement
from math import prod
from typing import Any

import torch
from torch import Tensor

from piper.capture import refusals
from piper.capture.source_lines import current_line


def covariance(
    func: Any, input: Tensor, *, correction: int = 1, fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of rows, over columns. torch asks whether there is something left to divide by."""
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    kind = (rows.dtype if is_inexact(rows) else torch.get_default_dtype()).to_real()
    given = [checked(one, kind) for one in (fweights, aweights) if one is not None]
    weights = prod(given) if given else rows.new_ones(rows.shape[1], dtype=kind)
    total = weights.sum()
    left = total - correction
    if aweights is not None and correction:
        left = total - correction * (weights * given[-1]).sum() / total
    apart = rows - ((rows * weights).sum(1) / total).unsqueeze(1)
    return (apart @ (apart * weights).mH / left.clamp(min=0)).squeeze()


def checked(weights: Tensor, kind: torch.dtype) -> Tensor:
    """A negative weight is an error in torch. Here, it gives NaN."""
    real = weights if is_inexact(weights) else weights.to(kind)
    return real.masked_fill(weights < 0, float("nan"))


def is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def correlation(func: Any, input: Tensor) -> Tensor:
    found = covariance(func, input)
    if not found.dim():
        return found / found
    spread = found.diagonal().real.sqrt()
    found = found / spread[:, None] / spread[None]
    if not found.is_complex():
        return found.clip(-1, 1)
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))


def choices(func: Any, input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """torch chooses them by a mask."""
    if input.dim() != 1 or r < 1 or not isinstance(input.shape[0], int):
        return func(input, r, with_replacement)
    made = combinations_with_replacement if with_replacement else combinations
    places = torch.tensor([*made(range(input.shape[0]), r)], device=input.device, dtype=torch.int64)
    return input[places.reshape(-1, r)]


def least_squares(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise refusals.least_squares(current_line())
