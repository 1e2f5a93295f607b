"""Pieces of tensors: how a device takes its own, and how messages bring them together.

Messages are flat: they join or cut tensors along dimension 0, whichever dimension a value is cut
along. What brings the elements into that order is part of the graphs on both sides.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from piper.capture.graphs.division.calls import Emitter, Shape, shape
from piper.ir.placement.placements import Cut

aten = torch.ops.aten


def _split_dim(whole: Shape, cut: Cut, ways: int) -> list[int]:
    """The shape with the cut dimension as blocks, devices, and what one device has of a block."""
    each = whole[cut.dim] // (cut.blocks * ways)
    return [*whole[: cut.dim], cut.blocks, ways, each, *whole[cut.dim + 1 :]]


def _mine(emit: Emitter, cut: Cut, ways: int) -> fx.Node:
    """Which pieces of each block are this device's."""
    rank = emit(aten.reshape.default, emit.rank, [1])
    if not cut.zigzag:
        return rank
    other = emit(aten.rsub.Scalar, rank, 2 * ways - 1)
    return emit(aten.cat.default, [rank, other])


def _local(whole: Shape, cut: Cut, ways: int) -> list[int]:
    return [*whole[: cut.dim], whole[cut.dim] // ways, *whole[cut.dim + 1 :]]


def own_piece(emit: Emitter, node: fx.Node, cut: Cut, ways: int) -> fx.Node:
    """This device's piece of a whole tensor."""
    whole = shape(node)
    split = emit(aten.reshape.default, node, _split_dim(whole, cut, cut.parts(ways)))
    mine = emit(aten.index_select.default, split, cut.dim + 1, _mine(emit, cut, ways))
    return emit(aten.reshape.default, mine, _local(whole, cut, ways))


def positions(emit: Emitter, size: int, cut: Cut, ways: int) -> fx.Node:
    """Where the elements of this device's piece are in the whole dimension."""
    device = emit.rank.meta["val"].device
    every = emit(aten.arange.default, size, device=device)
    return own_piece(emit, every, replace(cut, dim=0), ways)


def pack(emit: Emitter, node: fx.Node, cut: Cut, ways: int) -> fx.Node:
    """A whole tensor as the pieces of all devices, one after the other along dimension 0."""
    whole = shape(node)
    node = _ordered(emit, node, cut, ways)
    split = emit(aten.reshape.default, node, _split_dim(whole, cut, ways))
    order = [cut.dim + 1, *(d for d in range(len(whole) + 2) if d != cut.dim + 1)]
    first, *rest = _local(whole, cut, ways)
    moved = emit(aten.permute.default, split, order)
    return emit(aten.reshape.default, moved, [ways * first, *rest])


def unpack(emit: Emitter, node: fx.Node, cut: Cut, ways: int) -> fx.Node:
    """The whole tensor, from the pieces of all devices along dimension 0. The inverse of `pack`."""
    first, *rest = shape(node)
    local = [first // ways, *rest]
    each = local[cut.dim] // cut.blocks
    split = [ways, *local[: cut.dim], cut.blocks, each, *local[cut.dim + 1 :]]
    order = list(range(1, len(split)))
    order.insert(cut.dim + 1, 0)
    moved = emit(aten.permute.default, emit(aten.reshape.default, node, split), order)
    whole = [*local[: cut.dim], local[cut.dim] * ways, *local[cut.dim + 1 :]]
    return _disordered(emit, emit(aten.reshape.default, moved, whole), cut, ways)


def _ordered(emit: Emitter, node: fx.Node, cut: Cut, ways: int) -> fx.Node:
    """A whole tensor with the two pieces of each device side by side."""
    return _zigzag(emit, node, cut, ways, halves=1, pairs=2) if cut.zigzag else node


def _disordered(emit: Emitter, node: fx.Node, cut: Cut, ways: int) -> fx.Node:
    """The inverse of `_ordered`."""
    return _zigzag(emit, node, cut, ways, halves=2, pairs=1) if cut.zigzag else node


def _zigzag(emit: Emitter, node: fx.Node, cut: Cut, ways: int, halves: int, pairs: int) -> fx.Node:
    """Move the dimension of the two halves, so many places behind that of the cut, to `pairs`.

    Of the second half, the devices are in the opposite order.
    """
    whole, parts = shape(node), [ways]
    parts.insert(halves - 1, 2)
    sizes = [*whole[: cut.dim], cut.blocks, *parts, -1, *whole[cut.dim + 1 :]]
    split = emit(aten.reshape.default, node, sizes)
    first, second = (emit(aten.select.int, split, cut.dim + halves, k) for k in (0, 1))
    second = _reversed(emit, second, cut.dim + 1, ways)
    both = emit(aten.stack.default, [first, second], cut.dim + pairs)
    return emit(aten.reshape.default, both, list(whole))


def _reversed(emit: Emitter, node: fx.Node, dim: int, size: int) -> fx.Node:
    device = emit.rank.meta["val"].device
    order = emit(aten.arange.start_step, size - 1, -1, -1, device=device)
    return emit(aten.index_select.default, node, dim, order)
