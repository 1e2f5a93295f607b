"""Ring attention: in each step, a device attends to the keys and values of one of the others.

All devices run the same code. Which keys they have depends on their rank, so what differs is
chosen by it: a block of keys that come later than all queries counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, Option, shape
from piper.capture.graphs.division.pieces import own_piece
from piper.capture.graphs.division.rules.products import TOKENS, query_rows
from piper.capture.graphs.division.rules.table import rule
from piper.capture.kernels import attention_block, ring
from piper.ir.placements import Cut, Placement, Shifted

aten = torch.ops.aten
NEVER = float("-inf")  # the largest score of a query that sees no key
assert ring.BLOCK and attention_block.ATTEND  # which registers the operators


def _block(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    query, pair, mask, step, features, causal, scale = args
    keys = _Keys(pair, features, scale)
    if mask is not None:
        return keys.attend(emit, query, mask=_columns(call, option, emit, mask, step))
    if not causal or step == 0:  # a device's own tokens are in order
        return keys.attend(emit, query, causal=causal)
    earlier = emit(aten.ge.Scalar, emit.rank, step)  # whether its keys come before these queries
    if call.zigzag:
        return _halves(emit, query, keys, earlier)
    return _unless(emit, keys.attend(emit, query), emit(aten.logical_not.default, earlier))


class _Keys:
    """Keys and values side by side, and how they are read."""

    def __init__(self, pair: fx.Node, features: int, scale: float) -> None:
        self.pair, self.features, self.scale = pair, features, scale

    def attend(
        self, emit: Emitter, query: fx.Node, mask: fx.Node | None = None, causal: bool = False
    ) -> fx.Node:
        key = emit(aten.slice.Tensor, self.pair, -1, 0, self.features)
        val = emit(aten.slice.Tensor, self.pair, -1, self.features, shape(self.pair)[-1])
        return emit(attention_block.ATTEND, query, key, val, mask, causal, self.scale)

    def of(self, pair: fx.Node) -> _Keys:
        return _Keys(pair, self.features, self.scale)


def _columns(call: Call, option: Option, emit: Emitter, mask: fx.Node, step: int) -> fx.Node:
    """Of a mask of all keys, those that are here in this step."""
    assert isinstance(option.output, Cut)
    before = emit(aten.sub.Tensor, emit.rank, step)
    source = emit(aten.remainder.Scalar, before, call.ways)
    cut = replace(option.output, dim=len(shape(mask)) - 1)
    return own_piece(replace(emit, rank=source), mask, cut, call.ways)


def _halves(emit: Emitter, query: fx.Node, keys: _Keys, earlier: fx.Node) -> fx.Node:
    """Devices i and j have the parts i and 2n-1-i, and j and 2n-1-j, of all tokens.

    The later half of the queries sees the earlier half of the keys, whatever i and j are. Besides,
    the earlier halves see each other if j < i, and else the later halves do. So there are two
    products of halves on every device. No mask is needed.
    """
    (q0, q1), (k0, k1) = (_halved(emit, one) for one in (query, keys.pair))
    q, k = (emit(aten.where.self, earlier, *both) for both in ((q0, q1), (k0, k1)))
    both = keys.of(emit(aten.cat.default, [k0, k])).attend(emit, emit(aten.cat.default, [q1, q]))
    always, chosen = _halved(emit, both, dim=0)
    first = _unless(emit, chosen, emit(aten.logical_not.default, earlier))
    second = _added(emit, always, _unless(emit, chosen, earlier))
    return emit(aten.cat.default, [first, second], TOKENS)


def _halved(emit: Emitter, node: fx.Node, dim: int = TOKENS) -> tuple[fx.Node, fx.Node]:
    size = shape(node)[dim]
    parts = (0, size // 2), (size // 2, size)
    first, second = (emit(aten.slice.Tensor, node, dim, *part) for part in parts)
    return first, second


def _parted(emit: Emitter, sums: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Weighted sums and their weights, and the largest scores, which are constants."""
    size = shape(sums)[-1]
    body = emit(aten.slice.Tensor, sums, -1, 0, size - 1)
    most = emit(aten.slice.Tensor, sums, -1, size - 1, size)
    return body, emit(aten.detach.default, most)


def _unless(emit: Emitter, sums: fx.Node, never: fx.Node) -> fx.Node:
    """Nothing, where `never` holds."""
    body, most = _parted(emit, sums)
    return emit(aten.cat.default, [body, emit(aten.masked_fill.Scalar, most, never, NEVER)], -1)


def _added(emit: Emitter, one: fx.Node, other: fx.Node) -> fx.Node:
    (body, most), (body2, most2) = (_parted(emit, sums) for sums in (one, other))
    new = emit(aten.maximum.default, most, most2)
    finite = emit(aten.masked_fill.Scalar, new, emit(aten.eq.Scalar, new, NEVER), 0.0)
    scaled = [
        emit(aten.mul.Tensor, sums, emit(aten.exp.default, emit(aten.sub.Tensor, old, finite)))
        for sums, old in ((body, most), (body2, most2))
    ]
    return emit(aten.cat.default, [emit(aten.add.Tensor, *scaled), new], -1)


@rule(torch.ops.piper.ring_block, local=_block, alone=True)
def ring_block(call: Call) -> Iterator[Option]:
    """Its keys and values have come as many steps as its number says."""
    own = Cut(TOKENS, 1, call.zigzag)
    step = call.argument("step")
    keys: Placement = Shifted(own, step) if step else own
    masks = (query_rows(mask, own) for mask in call.shapes[2:])
    yield Option((own, keys, *masks), own)


def _sum(call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    return _added(emit, *args)


@rule(torch.ops.piper.ring_sum, local=_sum, alone=True)
def ring_sum(call: Call) -> Iterator[Option]:
    yield Option((Cut(TOKENS),) * 2, Cut(TOKENS))


def _result(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """A query that sees no key gives 0."""
    (sums, dtype), size = args, shape(args[0])[-1]
    total = emit(aten.slice.Tensor, sums, -1, size - 2, size - 1)
    some = emit(aten.masked_fill.Scalar, total, emit(aten.eq.Scalar, total, 0.0), 1.0)
    found = emit(aten.div.Tensor, emit(aten.slice.Tensor, sums, -1, 0, size - 2), some)
    if value(found).dtype != dtype:
        found = emit(aten._to_copy.default, found, dtype=dtype)
    return found


@rule(torch.ops.piper.ring_result, local=_result, alone=True)
def ring_result(call: Call) -> Iterator[Option]:
    yield Option((Cut(TOKENS),), Cut(TOKENS))


@rule(torch.ops.piper.attend)
def block_attention(call: Call) -> Iterator[Option]:
    """Along another axis: by heads, or by batch."""
    query, key, _, *masks = call.shapes
    for cut in call.cuts((0, 1)):
        if cut.dim == 0 or cut.blocks == 1 or query[1] == key[1]:
            yield Option((cut, cut, cut, *(query_rows(mask, cut) for mask in masks)), cut)
