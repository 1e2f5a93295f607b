"""Losses of classes from operators that can be divided: no device needs whole logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, shape
from piper.capture.kernels.log_sums import LOG_SUM

aten = torch.ops.aten
MEAN, SUM = 1, 2  # reductions of losses
SHORT = (torch.bfloat16, torch.float16)  # torch sums these in float32


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
    return emit(aten.logsumexp.default, emit(LOG_SUM, cut, -1), [-1])


def log_softmax(call: Call, emit: Emitter) -> fx.Node | None:
    given = call.node.args[0]
    last = call.dim() == len(call.shape) - 1
    if not last or call.argument("dtype") is not None or value(given).dtype in SHORT:
        return None
    total = emit(aten.unsqueeze.default, _log_sum(emit, given, call.ways), -1)
    return emit(aten.sub.Tensor, given, total)


def cross_entropy(call: Call, emit: Emitter) -> fx.Node | None:
    """No device needs whole logits: only sums of exponentials, and the logit of the label."""
    if not _is_plain_loss(call):
        return None
    logits = _long(emit, _rows(call, emit))
    labels, kept = _labels(call, emit)
    total = _log_sum(emit, logits, call.ways)
    each = emit(aten.sub.Tensor, total, _picked(emit, logits, labels))
    smoothing = call.argument("label_smoothing", 0.0)
    if smoothing:
        every = emit(aten.sub.Tensor, total, emit(aten.mean.dim, logits, [1]))
        each, every = (
            emit(aten.mul.Tensor, one, share)
            for one, share in ((each, 1 - smoothing), (every, smoothing))
        )
        each = emit(aten.add.Tensor, each, every)
    return _reduced(call, emit, each, kept)


def _rows(call: Call, emit: Emitter) -> fx.Node:
    """Classes are the last of two dimensions, not the second of several."""
    given: Any = call.node.args[0]
    if len(call.shapes[0]) == 2:
        return given
    last = emit(aten.movedim.int, given, 1, -1)
    return emit(aten.reshape.default, last, [-1, call.shapes[0][1]])


def nll_loss(call: Call, emit: Emitter) -> fx.Node | None:
    if not _is_plain_loss(call):
        return None
    labels, kept = _labels(call, emit)
    each = emit(aten.neg.default, _picked(emit, _long(emit, _rows(call, emit)), labels))
    return _reduced(call, emit, each, kept)


def _is_plain_loss(call: Call) -> bool:
    rows = len(call.shapes[0]) == len(call.shapes[1]) + 1 > 1
    reduced = call.argument("reduction", MEAN) in (MEAN, SUM)
    return rows and reduced and call.argument("weight") is None


def _labels(call: Call, emit: Emitter) -> tuple[fx.Node, fx.Node]:
    """Labels that exist, and which of them count."""
    labels: Any = call.node.args[1]
    if len(call.shapes[1]) > 1:
        labels = emit(aten.reshape.default, labels, [-1])
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
