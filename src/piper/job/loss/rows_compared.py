"""Compare the rows of microbatches with those of a whole batch, on numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piper.capture.trace.trials.trial_run import Result


def where_rows_meet(
    whole: Sequence[Result], half: Sequence[Result], times: int, tolerance: float
) -> str:
    """The first line whose result for a microbatch is no part of its result for the whole."""
    if [one.line for one in whole] != [one.line for one in half]:  # as in a loop over rows
        whole, half = last_of_each_line(whole), last_of_each_line(half)
    pairs = zip(whole, half, strict=False)
    apart = (a.line for a, b in pairs if rows_apart(a.tensor, b.tensor, times, tolerance))
    return next(apart, "")


def last_of_each_line(results: Sequence[Result]) -> list[Result]:
    """In the order in which they first ran."""
    return list({one.line: one for one in results}.values())


def rows_apart(whole: Tensor, half: Tensor, times: int, tolerance: float) -> bool:
    """Whether a row of one tensor is missing in the other, which has so many times its rows."""
    dim = growing(whole, half, times)
    if dim is None:
        return False
    some, rows = (plain(one.movedim(dim, 0)) for one in (half, whole))
    return not is_among(some, rows, tolerance)


def is_in_another_order(
    whole: Tensor, one: Tensor, other: Tensor, times: int, tolerance: float
) -> bool:
    """Whether the rows of both microbatches, as often as they come, are not those of the whole."""
    dim = growing(whole, one, times)
    if dim is None or one.shape != other.shape:
        return False
    first, second = repeats(times)
    every = torch.cat([one] * first + [other] * second, dim)
    joined, rows = (plain(t.movedim(dim, 0)) for t in (every, whole))
    return not is_among(joined.reshape(1, -1), rows.reshape(1, -1), tolerance)


def repeats(times: int) -> tuple[int, int]:
    """How many of so many microbatches are like the first of a pair, and like the second.

    >>> repeats(2), repeats(5)
    ((1, 1), (3, 2))
    """
    return times - times // 2, times // 2


def growing(whole: Tensor, half: Tensor, times: int) -> int | None:
    """The dimension of rows, of which one tensor has so many times as many."""
    if whole.dim() != half.dim() or whole.dtype is torch.bool or not half.numel():
        return None
    pairs = list(zip(whole.shape, half.shape, strict=True))
    grows = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    found = grows[0] if len(grows) == 1 else None
    return found if found is not None and pairs[found][0] == times * pairs[found][1] else None


def plain(tensor: Tensor) -> Tensor:
    """Rows of real and finite numbers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double().reshape(len(tensor), -1).nan_to_num(0.0, 1.0, -1.0)


def is_among(some: Tensor, rows: Tensor, tolerance: float) -> bool:
    """Whether each of some rows is one of the others, up to rounding."""
    size = float(max(some.abs().max(), rows.abs().max())) if some.numel() else 0.0
    apart = torch.cdist(some[None], rows[None], p=float("inf"))[0]
    return bool((apart.amin(1) <= tolerance * size).all())
