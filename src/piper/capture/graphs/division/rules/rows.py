"""Operators that work along some dimensions, alike for all others: scans, sorts, pads, pools."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from piper.capture.graphs.division.calls import Call, Option
from piper.capture.graphs.division.rules.table import rule
from piper.ir.placement.placements import Cut, Partial, Replicated

aten = torch.ops.aten


def _along(call: Call, default: Any = None) -> list[int]:
    """The dimensions that it works along. None given: all of them."""
    return call.dims(call.argument("dim", call.argument("dims", default)))


def _others(call: Call, along: Collection[int]) -> Iterator[Option]:
    for cut in call.cuts(d for d in range(len(call.shapes[0])) if d not in along):
        yield Option((cut,), cut)


PARTS = Option((Partial(),), Partial())  # of an operator that is linear


@rule(aten.cumprod, aten.logcumsumexp, aten.argsort)
def scanned(call: Call) -> Iterator[Option]:
    yield from _others(call, _along(call, -1))


@rule(aten.sort, aten.topk, aten.cummax, aten.cummin)
def sorted_rows(call: Call) -> Iterator[Option]:
    """Values and their indices. The placement of both is that of the argument. See `item`."""
    yield from _others(call, _along(call, -1))


@rule(aten.cumsum, aten.flip, aten.roll)
def moved_along(call: Call) -> Iterator[Option]:
    yield from _others(call, _along(call))
    yield PARTS


@rule(aten.diff)
def differences(call: Call) -> Iterator[Option]:
    if len(call.operands) == 1:  # nothing is put before or behind
        yield from _others(call, _along(call, -1))
        yield PARTS


@rule(aten.tril, aten.triu)
def triangle(call: Call) -> Iterator[Option]:
    size = len(call.shape)
    yield from _others(call, (size - 2, size - 1))
    yield PARTS


@rule(aten.pad, aten.constant_pad_nd)
def padded(call: Call) -> Iterator[Option]:
    size, around = len(call.shape), call.argument("pad")
    along = [size - 1 - k // 2 for k, count in enumerate(around) if count]
    yield from _others(call, along)
    if not call.argument("value"):  # which is for constants only
        yield PARTS


@rule(aten.repeat, aten.tile)
def repeated(call: Call) -> Iterator[Option]:
    """By dimensions that are not repeated."""
    old, new = call.shapes[0], call.shape
    shift = len(new) - len(old)
    for cut in call.cuts(d for d in range(len(old)) if old[d] == new[d + shift]):
        yield Option((cut,), Cut(cut.dim + shift, cut.blocks))
    yield PARTS


@rule(aten.repeat_interleave)
def repeated_in_place(call: Call) -> Iterator[Option]:
    """What is repeated stays beside itself, so every piece gives a piece."""
    if len(call.operands) > 1 or call.argument("output_size") is not None:
        return
    if call.argument("dim") is not None:
        yield from _others(call, ())
    yield PARTS


@rule(aten.unfold)
def unfolded(call: Call) -> Iterator[Option]:
    """Windows become the last dimension."""
    yield from _others(call, (call.dim(name="dimension"),))
    yield PARTS


@rule(aten.diagonal)
def diagonal(call: Call) -> Iterator[Option]:
    """Two dimensions become the last one."""
    size = len(call.shapes[0])
    gone = [call.dim(k, name) for k, name in enumerate(("dim1", "dim2"))]
    for cut in call.cuts(d for d in range(size) if d not in gone):
        yield Option((cut,), Cut(cut.dim - sum(dim < cut.dim for dim in gone), cut.blocks))
    yield PARTS


MAXIMA = {aten.max_pool1d: 1, aten.max_pool2d: 2, aten.max_pool3d: 3}
MEANS = {
    aten.avg_pool1d: 1,
    aten.avg_pool2d: 2,
    aten.avg_pool3d: 3,
    aten.adaptive_avg_pool1d: 1,
    aten.adaptive_avg_pool2d: 2,
    aten.adaptive_avg_pool3d: 3,
    aten.upsample_nearest1d: 1,
    aten.upsample_nearest2d: 2,
    aten.upsample_nearest3d: 3,
    aten.upsample_linear1d: 1,
    aten.upsample_bilinear2d: 2,
    aten.upsample_bicubic2d: 2,
    aten.upsample_trilinear3d: 3,
}  # fmt: skip  operators that are linear


@rule(*MAXIMA)
def largest_of_windows(call: Call) -> Iterator[Option]:
    """Every channel by itself."""
    size = len(call.shapes[0])
    yield from _others(call, range(size - MAXIMA[call.packet], size))


@rule(*MEANS)
def means_of_windows(call: Call) -> Iterator[Option]:
    size = len(call.shapes[0])
    yield from _others(call, range(size - MEANS[call.packet], size))
    yield PARTS


@rule(aten.pixel_shuffle, aten.pixel_unshuffle)
def shuffled_pixels(call: Call) -> Iterator[Option]:
    """Channels become pixels, or the other way round: those of one channel lie side by side."""
    size = len(call.shape)
    yield from _others(call, (size - 2, size - 1))
    yield PARTS


@rule(aten.view_as_complex)
def as_complex(call: Call) -> Iterator[Option]:
    yield from _others(call, (len(call.shape),))


@rule(aten.view_as_real)
def as_real(call: Call) -> Iterator[Option]:
    yield from _others(call, ())


@rule(aten.cdist)
def distances(call: Call) -> Iterator[Option]:
    """[..., rows, features] and [..., columns, features]."""
    left, right = call.shapes
    size = len(left)
    if len(right) != size:
        return
    for cut in call.cuts(d for d in range(size - 2) if left[d] == right[d]):
        yield Option((cut, cut), cut)
    for cut in call.cuts((size - 2,)):
        yield Option((cut, Replicated()), cut)
        yield Option((Replicated(), cut), Cut(size - 1, cut.blocks))
