"""Operators that look up rows, or write them: embedding, gather, index, scatter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, Option, shape
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


def _kept(emit: Emitter, found: fx.Node, mine: fx.Node) -> fx.Node:
    """Zeros for what others have: not a product, since what was found instead may be infinite."""
    return emit(aten.masked_fill.Scalar, found, emit(aten.logical_not.default, mine), 0.0)


def _vocabulary(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Tokens of other devices give zeros here. The padding row gets no gradient."""
    if option.output != Partial():
        return emit(call.node.target, *args, **kwargs)
    weight, index = args[:2]
    own, mine = _own(emit, index, call.shapes[0][0] // call.ways, call.ways)
    found = emit(aten.embedding.default, weight, own)
    found = _kept(emit, found, emit(aten.unsqueeze.default, mine, -1))
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
    return _kept(emit, emit(aten.gather.default, given, dim, own), mine)


@rule(aten.gather, local=_gather)
def gather(call: Call) -> Iterator[Option]:
    """By other dimensions, or each device finds what it has."""
    dim = call.dim()
    given, index = call.shapes
    alike = (d for d in range(len(index)) if len(given) == len(index) and given[d] == index[d])
    for cut in call.cuts(d for d in alike if d != dim):
        yield Option((cut, cut), cut)
    if not call.zigzag:
        yield Option((Cut(dim), Replicated()), Partial())


@rule(aten.index_select)
def index_select(call: Call) -> Iterator[Option]:
    dim = call.dim()
    for cut in call.cuts(d for d in range(len(call.shape)) if d != dim):
        yield Option((cut, Replicated()), cut)
    for blocks in call.blocks:
        yield Option((Replicated(), Cut(0, blocks)), Cut(dim, blocks))
    yield Option((Partial(), Replicated()), Partial())


@rule(aten.index)
def indexed(call: Call) -> Iterator[Option]:
    """By dimensions without an index, or by those of the only index. Masks are not divided."""
    given, indices = call.shapes[0], call.argument("indices")
    places = [k for k, index in enumerate(indices) if index is not None]
    counts = [len(shape(node)) for node in call.operands[1:]]
    if places != list(range(places[0], places[0] + len(places))) or _has_mask(call):
        return  # the dimensions of the indices come first
    wide, rest = max(counts), (Replicated(),) * len(places)
    for cut in call.cuts(d for d in range(len(given)) if d not in places):
        moved = cut.dim if cut.dim < places[0] else cut.dim - len(places) + wide
        yield Option((cut, *rest), Cut(moved, cut.blocks))
    if len(places) == 1:
        for cut in call.cuts(range(wide)):
            yield Option((Replicated(), cut), Cut(places[0] + cut.dim, cut.blocks))
    yield Option((Partial(), *rest), Partial())


def _has_mask(call: Call) -> bool:
    return any(value(node).dtype in (torch.bool, torch.uint8) for node in call.operands[1:])


@rule(aten.take_along_dim)
def taken(call: Call) -> Iterator[Option]:
    dim, (given, index) = call.argument("dim"), call.shapes
    if dim is None:
        return  # of all elements in a row
    other = (d for d in range(len(index)) if d != call.dim() and given[d] == index[d])
    for cut in call.cuts(other):
        yield Option((cut, cut), cut)
    yield Option((Partial(), Replicated()), Partial())


@rule(aten.scatter, aten.scatter_add)
def scattered(call: Call) -> Iterator[Option]:
    """By other dimensions, if all of a tensor is written along them."""
    dim = call.dim()
    count = len(call.operands)
    alike = (d for d in range(len(call.shape)) if len({one[d : d + 1] for one in call.shapes}) == 1)
    for cut in call.cuts(d for d in alike if d != dim):
        yield Option((cut,) * count, cut)
    if count == 3 and call.argument("reduce") is None:
        yield Option((Partial(), Replicated(), Partial()), Partial())


@rule(aten.index_add, aten.index_copy)
def written_rows(call: Call) -> Iterator[Option]:
    dim = call.dim()
    for cut in call.cuts(d for d in range(len(call.shape)) if d != dim):
        yield Option((cut, Replicated(), cut), cut)
    yield Option((Partial(), Replicated(), Partial()), Partial())
