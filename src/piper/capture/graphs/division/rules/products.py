"""Matrix products and attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piper.capture.graphs.division.calls import Call, Emitter, Option, Shape
from piper.capture.graphs.division.pieces import positions
from piper.capture.graphs.division.rules.table import rule
from piper.capture.kernels.scaled_linear import SCALED_LINEAR
from piper.ir.placement.placements import Cut, Invariant, Partial, Placement, Replicated

aten = torch.ops.aten
HEADS, TOKENS = 1, 2  # dimensions of attention: [batch, heads, tokens, features]


@rule(aten.linear)
def linear(call: Call) -> Iterator[Option]:
    """Without a bias: column-parallel, row-parallel, or by tokens."""
    if len(call.operands) > 2:
        return
    last = len(call.shapes[0]) - 1
    for blocks in call.blocks:
        yield Option((Replicated(), Cut(0, blocks)), Cut(last, blocks))
        yield Option((Cut(last, blocks), Cut(1, blocks)), Partial())
    for cut in call.cuts(range(last)):
        yield Option((cut, Replicated()), cut)
    yield from _bilinear()


@rule(SCALED_LINEAR.overloadpacket, alone=True)
def scaled_linear(call: Call) -> Iterator[Option]:
    """By tokens only: with a part of a row or of a weight, scales would be others. So they would be
    for gradients that are parts of a sum."""
    yield Option((Invariant(), Invariant()), Invariant())
    for cut in call.cuts(range(len(call.shapes[0]) - 1)):
        yield Option((cut, Replicated()), cut)


@rule(aten.matmul, aten.mm, aten.bmm)
def product(call: Call) -> Iterator[Option]:
    left, right = call.shapes
    rows, columns = len(left) - 1, len(right) - 1  # the last dimension of each
    if not rows or not columns:
        yield from _with_vector(call)
        return
    last = len(call.shape) - 1
    for blocks in call.blocks:
        yield Option((Cut(rows, blocks), Cut(columns - 1, blocks)), Partial())
        if rows >= columns:
            yield Option((Replicated(), Cut(columns, blocks)), Cut(last, blocks))
        if rows >= columns:
            yield Option((Cut(rows - 1, blocks), Replicated()), Cut(last - 1, blocks))
    if columns == 1:
        for cut in call.cuts(range(rows - 1)):
            yield Option((cut, Replicated()), cut)
    elif rows == columns:
        for cut in call.cuts(d for d in range(rows - 1) if left[d] == right[d]):
            yield Option((cut, cut), cut)
    yield from _bilinear()


def _with_vector(call: Call) -> Iterator[Option]:
    """A matrix, or several, times a vector."""
    rows, columns = (len(one) - 1 for one in call.shapes)
    if columns:
        return
    for blocks in call.blocks:
        yield Option((Cut(rows, blocks), Cut(0, blocks)), Partial())
    for cut in call.cuts(range(rows)):
        yield Option((cut, Replicated()), cut)
    yield from _bilinear()


def _bilinear() -> Iterator[Option]:
    """Of two factors, one may be in parts."""
    yield Option((Partial(), Replicated()), Partial())
    yield Option((Replicated(), Partial()), Partial())


def _some_queries(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Causal attention of some queries: each sees the keys up to its place in the whole."""
    cut = option.output
    causal = call.argument("is_causal", False)
    if not (isinstance(cut, Cut) and cut.dim == TOKENS and causal):
        return emit(call.node.target, *args, **kwargs)
    mine = positions(emit, call.shape[TOKENS], cut, call.ways)
    keys = emit(aten.arange.default, call.shapes[1][TOKENS], device=_device(call))
    mask = emit(aten.ge.Tensor, emit(aten.unsqueeze.default, mine, 1), keys)
    rest = {key: value for key, value in kwargs.items() if key not in ("is_causal", "attn_mask")}
    return emit(call.node.target, *args[:3], mask, **rest)


def _device(call: Call) -> torch.device:
    return call.node.meta["val"].device


@rule(aten.scaled_dot_product_attention, local=_some_queries)
def attention(call: Call) -> Iterator[Option]:
    """By batch or heads; or some queries with all keys and values."""
    query, key, _, *masks = call.shapes
    if len(query) != 4:
        return
    for cut in call.cuts((0, HEADS)):
        grouped = query[HEADS] != key[HEADS]
        if cut.dim == 0 or cut.blocks == 1 or not grouped:
            yield Option((cut, cut, cut, *(query_rows(shape, cut) for shape in masks)), cut)
    for cut in call.cuts((TOKENS,)):
        whole = (Replicated(), Replicated())
        yield Option((cut, *whole, *(query_rows(shape, cut) for shape in masks)), cut)


def query_rows(mask: Shape, cut: Cut) -> Placement:
    """A mask is broadcast to [batch, heads, queries, keys]."""
    dim = cut.dim - (4 - len(mask))
    return Cut(dim, cut.blocks) if dim >= 0 and mask[dim] > 1 else Replicated()
