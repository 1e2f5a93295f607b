"""Attention as a ring: keys and values travel from device to device, block by block.

    attention(q, k, v)
    -->
    block(q, kv, step 0) + block(q, kv, step 1) + ... -> result

In step s, a device has the keys and values of the one s places before it. How each block is placed
is in `rules/ring.py`, where messages follow from.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import line, value
from piper.capture.graphs.division import refusals
from piper.capture.graphs.division.calls import Call, Emitter, packet, shape
from piper.capture.graphs.division.equivalents import replace_call
from piper.capture.kernels import ring
from piper.capture.trace.grad_modes import Mode, autocast
from piper.ir.placement.division import DivisionRequest

aten = torch.ops.aten
# Attention that drops out scores is written as products before, so that all devices agree on them.
NONE = "it does not call scaled_dot_product_attention, or only with dropout of scores"
TOKENS = 2  # the dimension of tokens: [batch, heads, tokens, features]


def rewrite_attention(
    nodes: Mapping[fx.Node, Mode], request: DivisionRequest, free: Container[fx.Node]
) -> None:
    """Every attention that can be, in place. `nodes` ran under these modes."""
    every = [node for node in nodes if packet(node) is aten.scaled_dot_product_attention]
    calls = [Call(node, request.ways, zigzag=request.is_zigzag) for node in every]
    reasons = {call.node: why_not(call, free) for call in calls}
    if all(reasons.values()):
        where = line(every[0]) if every else ""
        reason = reasons[every[0]] if every else NONE
        raise refusals.no_ring(where, str(request.attention), reason)
    for call in calls:
        if not reasons[call.node]:
            with call.node.graph.inserting_before(call.node), autocast(nodes[call.node]):
                replace_call(call, in_blocks)


def in_blocks(call: Call, emit: Emitter) -> fx.Node:
    """The same attention, as a sum over blocks of keys."""
    query, key, val = call.node.args[:3]
    features = call.shapes[0][-1]
    scale = call.argument("scale") or features**-0.5
    rest = features, bool(call.argument("is_causal", False)), float(scale)
    mask: Any = call.argument("attn_mask")
    pair = emit(aten.cat.default, [key, val], -1)  # one message instead of two
    total, token = emit(ring.BLOCK, query, pair, mask, None, 0, *rest), None
    for step in range(1, call.ways):
        given = query, pair, mask, token, step, *rest
        if step < call.ways - 1:
            both = emit(ring.PASSING, *given)
            sums, token = (emit(operator.getitem, both, k) for k in (0, 1))
        else:
            sums = emit(ring.BLOCK, *given)
        total = emit(ring.SUM, total, sums)
    return emit(ring.RESULT, total, value(call.node).dtype)


def why_not(call: Call, free: Container[fx.Node]) -> str:
    """Why an attention cannot be a ring. Empty: it can. `free` depends on no parameter."""
    (query, key), mask = call.shapes[:2], call.argument("attn_mask")
    parts = 2 * call.ways if call.zigzag else call.ways
    if len(query) != 4 or query[TOKENS] != key[TOKENS]:
        return "it is not attention of a sequence with itself"
    if query[TOKENS] % parts:
        return f"its {query[TOKENS]} tokens cannot be cut in {parts} equal parts"
    if call.argument("dropout_p", 0.0):
        return "it drops out scores"
    if mask is not None and mask not in free:
        return "its mask depends on parameters"
    if mask is not None and shape(mask)[-1] != key[TOKENS]:
        return "its mask is the same for all keys"
    return ""
