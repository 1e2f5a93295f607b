"""The same numbers from operators that can be divided: up to the order of floating-point sums."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, packet, shape, tensors
from piper.capture.graphs.division.equivalent_losses import cross_entropy, log_softmax, nll_loss
from piper.capture.graphs.division.rules.convolutions import DIMENSIONS
from piper.capture.trace.grad_modes import Mode, autocast
from piper.ir.placement.division import What

aten = torch.ops.aten
Rewrite = Callable[[Call, Emitter], fx.Node | None]  # None: leave it as it is


def rewrite(nodes: Mapping[fx.Node, Mode], ways: int, what: What) -> None:
    """Replace what can be divided better, in place. `nodes` ran under these modes."""
    for node, mode in nodes.items():
        made = EQUIVALENTS.get(packet(node))
        grouped = packet(node) is aten.scaled_dot_product_attention
        if made is not None and has_sizes(node) and (what == "weights" or not grouped):
            with node.graph.inserting_before(node), autocast(mode):
                replace_call(Call(node, ways), made)


def has_sizes(node: fx.Node) -> bool:
    """Whether all sizes are known. What depends on data is refused later, with its line."""
    found = (one for each in (node, *node.all_input_nodes) for one in tensors(each))
    sizes = (size for one in found if isinstance(one, torch.Tensor) for size in one.shape)
    return all(isinstance(size, int) for size in sizes)


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
    same = len(full) in (0, len(given))
    return None if same else emit(aten.cat.default, full, *call.node.args[1:])


def _attention(call: Call, emit: Emitter) -> fx.Node | None:
    """If key heads do not divide, each query head gets its own."""
    query, *pair = call.node.args[:3]
    if len(call.shape) != 4:
        return None  # no heads
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


def _convolution(call: Call, emit: Emitter) -> fx.Node | None:
    """A bias is added to each channel, once."""
    bias = call.argument("bias")
    if bias is None or len(call.shape) != DIMENSIONS[call.packet] + 2:
        return None
    kwargs = {key: item for key, item in call.node.kwargs.items() if key != "bias"}
    args = (
        call.node.args
        if len(call.node.args) < 3
        else (*call.node.args[:2], None, *call.node.args[3:])
    )
    made = emit(call.node.target, *args, **kwargs)
    column = [-1] + [1] * DIMENSIONS[call.packet]
    return emit(aten.add.Tensor, made, emit(aten.view.default, bias, column))


def _glu(call: Call, emit: Emitter) -> fx.Node | None:
    """Two halves of a fused product."""
    both = emit(aten.chunk.default, call.node.args[0], 2, call.argument("dim", -1))
    value_, gate = (emit(operator.getitem, both, k) for k in range(2))
    return emit(aten.mul.Tensor, value_, emit(aten.sigmoid.default, gate))


def _norm(call: Call, emit: Emitter) -> fx.Node | None:
    """Of vectors, where it is not one of matrices."""
    order, dims = call.argument("ord"), call.argument("dim")
    vectors = order is None or (
        isinstance(order, int | float) and dims is not None and len(dims) == 1
    )
    if not vectors or call.argument("dtype") is not None:
        return None
    how = 2 if order is None else order
    keep = call.argument("keepdim", False)
    return emit(aten.linalg_vector_norm.default, call.node.args[0], how, dims, keep)


def _filled(call: Call, emit: Emitter) -> fx.Node | None:
    """A tensor that takes only its type from another does not depend on where that is."""
    known = {aten.new_zeros: 0, aten.new_ones: 1}
    number = known[call.packet] if call.packet in known else call.argument("fill_value")
    if isinstance(number, fx.Node):
        return None
    made = value(call.node)
    return emit(aten.full.default, list(call.shape), number, dtype=made.dtype, device=made.device)


def _expanded(call: Call, emit: Emitter) -> fx.Node | None:
    """One of several tensors that are broadcast together."""
    several, place = call.node.args
    if not isinstance(several, fx.Node) or packet(several) is not aten.broadcast_tensors:
        return None
    given: Any = several.args[0]
    return emit(aten.expand.default, given[place], list(call.shape))


def _added_product(call: Call, emit: Emitter) -> fx.Node | None:
    if call.node.kwargs:
        return None
    added, left, right = call.node.args
    return emit(aten.add.Tensor, emit(aten.bmm.default, left, right), added)


EQUIVALENTS: dict[Any, Rewrite] = {
    aten.linear: _linear,
    aten.addmm: _addmm,
    aten.cat: _cat,
    aten.scaled_dot_product_attention: _attention,
    aten.log_softmax: log_softmax,
    aten.cross_entropy_loss: cross_entropy,
    aten.nll_loss_nd: nll_loss,
    **dict.fromkeys(DIMENSIONS, _convolution),
    aten.glu: _glu,
    aten.linalg_norm: _norm,
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full), _filled),
    operator.getitem: _expanded,
    aten.baddbmm: _added_product,
}
