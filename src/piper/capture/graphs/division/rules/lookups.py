"""Operators that look up rows: embedding, gather, index_select."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piper.capture.graphs.division.calls import Call, Emitter, Option
from piper.capture.graphs.division.rules.table import rule
from piper.ir.placement.placements import Cut, Partial, Replicated

aten = torch.ops.aten


def _own(emit: Emitter, index: fx.Node, size: int, ways: int) -> tuple[fx.Node, fx.Node]:
    """Indices into the rows of one device, and whether they are there. Others become 0.

    An index that no device has stays as it is, so that the lookup fails as that of one process.
    """
    first = emit(aten.mul.Tensor, emit.rank, size)
    own = emit(aten.sub.Tensor, index, first)
    mine, valid = _within(emit, own, size), _within(emit, index, size * ways)
    return emit(aten.where.self, valid, emit(aten.mul.Tensor, own, mine), index), mine


def _within(emit: Emitter, index: fx.Node, size: int) -> fx.Node:
    low, high = emit(aten.ge.Scalar, index, 0), emit(aten.lt.Scalar, index, size)
    return emit(aten.logical_and.default, low, high)


def _vocabulary(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Tokens of other devices give zeros here. The padding row gets no gradient."""
    if option.output != Partial():
        return emit(call.node.target, *args, **kwargs)
    weight, index = args[:2]
    own, mine = _own(emit, index, call.shapes[0][0] // call.ways, call.ways)
    found = emit(aten.embedding.default, weight, own)
    found = emit(aten.mul.Tensor, found, emit(aten.unsqueeze.default, mine, -1))
    padding = call.argument("padding_idx", -1)
    if padding < 0:
        return found
    padded = emit(aten.unsqueeze.default, emit(aten.eq.Scalar, index, padding), -1)
    return emit(aten.where.self, padded, emit(aten.detach.default, found), found)


@rule(aten.embedding, local=_vocabulary)
def embedding(call: Call) -> Iterator[Option]:
    """By features, by tokens, or by vocabulary."""
    if call.argument("scale_grad_by_freq", False) or call.argument("sparse", False):
        return  # a gradient depends on how often a token is in the whole batch
    rows = len(call.shapes[1])
    for blocks in call.blocks:
        yield Option((Cut(1, blocks), Replicated()), Cut(rows, blocks))
    for cut in call.cuts(range(rows)):
        yield Option((Replicated(), cut), cut)
    if not call.zigzag:  # a device's words are one after the other
        yield Option((Cut(0), Replicated()), Partial())


def _gather(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    if option.output != Partial():
        return emit(call.node.target, *args, **kwargs)
    given, dim, index = args[:3]
    own, mine = _own(emit, index, call.shapes[0][dim] // call.ways, call.ways)
    return emit(aten.mul.Tensor, emit(aten.gather.default, given, dim, own), mine)


@rule(aten.gather, local=_gather)
def gather(call: Call) -> Iterator[Option]:
    """By other dimensions, or each device finds what it has."""
    dim = call.argument("dim") % len(call.shape)
    given, index = call.shapes
    for cut in call.cuts(d for d in range(len(index)) if d != dim and given[d] == index[d]):
        yield Option((cut, cut), cut)
    if not call.zigzag:
        yield Option((Cut(dim), Replicated()), Partial())


@rule(aten.index_select)
def index_select(call: Call) -> Iterator[Option]:
    dim = call.argument("dim") % len(call.shape)
    for cut in call.cuts(d for d in range(len(call.shape)) if d != dim):
        yield Option((cut, Replicated()), cut)
    for blocks in call.blocks:
        yield Option((Replicated(), Cut(0, blocks)), Cut(dim, blocks))
    yield Option((Partial(), Replicated()), Partial())
