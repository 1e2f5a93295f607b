"""Ring attention: in each step, a device attends to the keys and values of one of the others.

All devices run the same code. Which keys they have depends on their rank, so what differs is
chosen by it: a block of keys that come later than all queries counts nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, Option, shape
from piper.capture.graphs.division.pieces import own_piece
from piper.capture.graphs.division.rules.products import TOKENS, query_rows
from piper.capture.graphs.division.rules.table import rule
from piper.capture.kernels import attention_block, ring
from piper.ir.placement.placements import Cut, Invariant, Placement, Replicated, Returned, Shifted

aten = torch.ops.aten
NEVER = float("-inf")  # the largest score of a query that sees no key
assert ring.BLOCK and attention_block.ATTEND  # which registers the operators


def _block(call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]) -> Any:
    query, pair, mask, token, step, features, causal, scale = args
    if step == 0:  # a device's own tokens, which are in order
        own = _columns(call, option, emit, mask, 0) if mask is not None else None
        return _own(emit, query, pair, own, features, causal, scale)
    if mask is not None:
        return _others(call, emit, query, pair, token, _columns(call, option, emit, mask, step))
    if not causal:
        return _others(call, emit, query, pair, token)
    earlier = emit(aten.ge.Scalar, emit.rank, step)  # whether its keys come before these queries
    later = emit(aten.logical_not.default, earlier)
    if not call.zigzag:
        return _finished(_others(call, emit, query, pair, token), partial(_unless, emit, later))
    made = _others(call, emit, query, pair, token, None, earlier)
    return _finished(made, partial(_halves, emit, earlier, later))


def _own(
    emit: Emitter, query: fx.Node, pair: fx.Node, mask: fx.Node | None, features: int,
    causal: bool, scale: float,
) -> fx.Node:  # fmt: skip
    key = emit(aten.slice.Tensor, pair, -1, 0, features)
    val = emit(aten.slice.Tensor, pair, -1, features, shape(pair)[-1])
    return emit(attention_block.ATTEND, query, key, val, mask, causal, scale)


def _others(
    call: Call, emit: Emitter, query: fx.Node, pair: fx.Node, token: fx.Node | None,
    mask: fx.Node | None = None, earlier: fx.Node | None = None,
) -> Any:  # fmt: skip
    """Attention to keys of another device, and a token if they travel on."""
    rest = call.argument("features"), call.argument("scale")
    given = query, pair, token, mask, earlier, *rest
    if call.node.target is not ring.PASSING:
        return emit(attention_block.ATTEND_LAST, *given)
    both = emit(attention_block.ATTEND_AND_PASS, *given)
    return tuple(emit(operator.getitem, both, k) for k in (0, 1))


def _finished(made: Any, change: Callable[[fx.Node], fx.Node]) -> Any:
    """The sums changed, and the token as it is."""
    return (change(made[0]), made[1]) if isinstance(made, tuple) else change(made)


def _columns(call: Call, option: Option, emit: Emitter, mask: fx.Node, step: int) -> fx.Node:
    """Of a mask of all keys, those that are here in this step."""
    assert isinstance(option.output, Cut)
    before = emit(aten.sub.Tensor, emit.rank, step)
    source = emit(aten.remainder.Scalar, before, call.ways)
    cut = replace(option.output, dim=len(shape(mask)) - 1)
    return own_piece(replace(emit, rank=source), mask, cut, call.ways)


def _halves(emit: Emitter, earlier: fx.Node, later: fx.Node, sums: fx.Node) -> fx.Node:
    """Devices i and j have the parts i and 2n-1-i, and j and 2n-1-j, of all tokens.

    The later half of the queries sees the earlier half of the keys, whatever i and j are. Besides,
    the earlier halves see each other if j < i, and else the later halves do. So there are two
    products of halves on every device, side by side in the batch. No mask is needed.
    """
    always, chosen = _halved(emit, sums, dim=0)
    first = _unless(emit, later, chosen)
    second = _added(emit, always, _unless(emit, earlier, chosen))
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
    return body, emit(attention_block.LARGEST, emit(aten.detach.default, sums))


def _unless(emit: Emitter, never: fx.Node, sums: fx.Node) -> fx.Node:
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


@rule(torch.ops.piper.ring_block, torch.ops.piper.ring_passing, local=_block, alone=True)
def ring_block(call: Call) -> Iterator[Option]:
    """Its keys and values have come as many steps as its number says."""
    own = Cut(TOKENS, 1, call.zigzag)
    step, mask, token = (call.argument(name) for name in ("step", "mask", "token"))
    read: list[Placement] = [own, Shifted(own, step) if step else own]
    if mask is not None:
        read.append(query_rows(shape(mask), own))
    if token is not None:
        read.append(Returned(own))
    yield Option(tuple(read), own)


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


@rule(torch.ops.piper.attend_and_pass, torch.ops.piper.attend_last, alone=True)
def passed_attention(call: Call) -> Iterator[Option]:
    """Along another axis: by heads, or all of it.

    What comes back for a token is no gradient, so devices must not have parts of it.
    """
    yield Option((Invariant(),) * len(call.operands), Invariant())
    query, pair = call.shapes[:2]
    names = "query", "pair", "token", "mask", "earlier"
    given = {name: call.argument(name) for name in names}
    for cut in call.cuts((1,)):
        if cut.blocks == 1 or query[1] == pair[1]:
            read: dict[str, Placement] = {"query": cut, "pair": cut, "token": cut}
            if given["mask"] is not None:
                read["mask"] = query_rows(shape(given["mask"]), cut)
            read["earlier"] = Replicated()
            yield Option(tuple(read[name] for name in names if given[name] is not None), cut)


@rule(torch.ops.piper.largest_scores)
def largest_scores(call: Call) -> Iterator[Option]:
    yield from (Option((cut,), cut) for cut in call.cuts(range(3)))


@rule(torch.ops.piper.attend)
def block_attention(call: Call) -> Iterator[Option]:
    """Along another axis: by heads, or by batch."""
    query, key, _, *masks = call.shapes
    for cut in call.cuts((0, 1)):
        if cut.dim == 0 or cut.blocks == 1 or query[1] == key[1]:
            yield Option((cut, cut, cut, *(query_rows(mask, cut) for mask in masks)), cut)
