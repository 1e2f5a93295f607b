"""The same numbers from operators that can be divided: up to the order of floating-point sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, packet, shape
from piper.capture.trace.grad_modes import Mode, autocast
from piper.ir.placement.division import What

aten = torch.ops.aten
MEAN, SUM = 1, 2  # reductions of losses
SHORT = (torch.bfloat16, torch.float16)  # torch sums these in float32
Rewrite = Callable[[Call, Emitter], fx.Node | None]  # None: leave it as it is


def rewrite(nodes: Mapping[fx.Node, Mode], ways: int, what: What) -> None:
    """Replace what can be divided better, in place. `nodes` ran under these modes."""
    for node, mode in nodes.items():
        made = EQUIVALENTS.get(packet(node))
        grouped = packet(node) is aten.scaled_dot_product_attention
        if made is not None and (what == "weights" or not grouped):
            with node.graph.inserting_before(node), autocast(mode):
                replace_call(Call(node, ways), made)


def replace_call(call: Call, made: Rewrite) -> None:
    node = call.node
    emit = Emitter(node.graph, node.meta, node)
    new = made(call, emit)
    if new is not None:
        if value(new).dtype != value(node).dtype:
            new = emit(aten._to_copy.default, new, dtype=value(node).dtype)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)


def _linear(call: Call, emit: Emitter) -> fx.Node | None:
    """A bias is added once, not by each part of a sum."""
    bias = call.argument("bias")
    if bias is None:
        return None
    product = emit(aten.linear.default, *call.node.args[:2])
    return emit(aten.add.Tensor, product, bias)


def _addmm(call: Call, emit: Emitter) -> fx.Node | None:
    if call.node.kwargs:
        return None
    bias, left, right = call.node.args
    return emit(aten.add.Tensor, emit(aten.mm.default, left, right), bias)


def _cat(call: Call, emit: Emitter) -> fx.Node | None:
    """Without empty tensors, which torch ignores."""
    given: Any = call.node.args[0]
    full = [node for node in given if shape(node) != (0,)]
    return None if len(full) == len(given) else emit(aten.cat.default, full, *call.node.args[1:])


def _attention(call: Call, emit: Emitter) -> fx.Node | None:
    """If key heads do not divide, each query head gets its own."""
    query, *pair = call.node.args[:3]
    heads, keys = call.shapes[0][1], call.shapes[1][1]
    if heads == keys or keys % call.ways == 0 or heads % call.ways:
        return None
    wide = [_repeated(emit, node, heads // keys) for node in pair]
    kwargs = {key: item for key, item in call.node.kwargs.items() if key != "enable_gqa"}
    return emit(call.node.target, query, *wide, *call.node.args[3:], **kwargs)


def _repeated(emit: Emitter, node: Any, times: int) -> fx.Node:
    batch, heads, tokens, features = shape(node)
    every = emit(aten.unsqueeze.default, node, 2)
    every = emit(aten.expand.default, every, [batch, heads, times, tokens, features])
    return emit(aten.reshape.default, every, [batch, heads * times, tokens, features])


def _long(emit: Emitter, node: fx.Node) -> fx.Node:
    """In a type that sums can be kept in."""
    if value(node).dtype not in SHORT:
        return node
    return emit(aten._to_copy.default, node, dtype=torch.float32)


def _log_sum(emit: Emitter, node: fx.Node, ways: int) -> fx.Node:
    """Logarithm of the sum of exponentials along the last dimension: of slices, then of these."""
    *rows, words = shape(node)
    slices = ways if words % ways == 0 else 1
    cut = emit(aten.view.default, node, [*rows, slices, words // slices])
    return emit(aten.logsumexp.default, emit(aten.logsumexp.default, cut, [-1]), [-1])


def _log_softmax(call: Call, emit: Emitter) -> fx.Node | None:
    given = call.node.args[0]
    last = call.argument("dim") % len(call.shape) == len(call.shape) - 1
    if not last or call.argument("dtype") is not None or value(given).dtype in SHORT:
        return None
    total = emit(aten.unsqueeze.default, _log_sum(emit, given, call.ways), -1)
    return emit(aten.sub.Tensor, given, total)


def _cross_entropy(call: Call, emit: Emitter) -> fx.Node | None:
    """No device needs whole logits: only sums of exponentials, and the logit of the label."""
    if not _is_plain_loss(call) or call.argument("label_smoothing", 0.0):
        return None
    logits = _long(emit, call.node.args[0])
    labels, kept = _labels(call, emit)
    total = _log_sum(emit, logits, call.ways)
    each = emit(aten.sub.Tensor, total, _picked(emit, logits, labels))
    return _reduced(call, emit, each, kept)


def _nll_loss(call: Call, emit: Emitter) -> fx.Node | None:
    if not _is_plain_loss(call):
        return None
    labels, kept = _labels(call, emit)
    each = emit(aten.neg.default, _picked(emit, _long(emit, call.node.args[0]), labels))
    return _reduced(call, emit, each, kept)


def _is_plain_loss(call: Call) -> bool:
    rows = len(call.shapes[0]) == 2 and len(call.shapes[1]) == 1
    reduced = call.argument("reduction", MEAN) in (MEAN, SUM)
    return rows and reduced and call.argument("weight") is None


def _labels(call: Call, emit: Emitter) -> tuple[fx.Node, fx.Node]:
    """Labels that exist, and which of them count."""
    labels = call.node.args[1]
    kept = emit(aten.ne.Scalar, labels, call.argument("ignore_index", -100))
    return emit(aten.mul.Tensor, labels, kept), kept


def _picked(emit: Emitter, rows: fx.Node, labels: fx.Node) -> fx.Node:
    column = emit(aten.unsqueeze.default, labels, 1)
    return emit(aten.squeeze.dim, emit(aten.gather.default, rows, 1, column), 1)


def _reduced(call: Call, emit: Emitter, each: fx.Node, kept: fx.Node) -> fx.Node:
    kept = emit(aten._to_copy.default, kept, dtype=value(each).dtype)
    loss = emit(aten.sum.default, emit(aten.where.self, *_masked(emit, kept, each)))
    if call.argument("reduction", MEAN) == MEAN:
        loss = emit(aten.div.Tensor, loss, emit(aten.sum.default, kept))
    return loss


def _masked(emit: Emitter, kept: fx.Node, each: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Rows that do not count give 0, even if they are infinite."""
    return emit(aten.ne.Scalar, kept, 0), each, emit(aten.zeros_like.default, kept)


EQUIVALENTS: dict[Any, Rewrite] = {
    aten.linear: _linear,
    aten.addmm: _addmm,
    aten.cat: _cat,
    aten.scaled_dot_product_attention: _attention,
    aten.log_softmax: _log_softmax,
    aten.cross_entropy_loss: _cross_entropy,
    aten.nll_loss_nd: _nll_loss,
}
