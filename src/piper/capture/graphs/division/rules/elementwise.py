"""Operators that work on each element by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, Option, Shape
from piper.capture.graphs.division.rules.table import rule
from piper.capture.kernels.dropout import DIVIDED_DROPOUT
from piper.ir.placement.placements import Cut, Partial, Placement, Replicated

aten = torch.ops.aten
LINEAR = (
    aten.neg, aten.clone, aten.alias, aten.detach, aten._to_copy, aten.to, aten.contiguous,
    aten.type_as, aten.lift_fresh_copy,
)  # fmt: skip
OTHERS = (
    aten.abs, aten.cos, aten.clamp, aten.clamp_max, aten.clamp_min, aten.elu, aten.eq, aten.erf,
    aten.exp, aten.ge, aten.gelu, aten.gt, aten.hardtanh, aten.isinf, aten.isnan, aten.le,
    aten.leaky_relu, aten.log, aten.log1p, aten.logical_and, aten.logical_not, aten.logical_or,
    aten.lt, aten.masked_fill, aten.maximum, aten.minimum, aten.mish, aten.ne, aten.pow,
    aten.reciprocal, aten.relu, aten.rsqrt, aten.rsub, aten.sigmoid, aten.sign, aten.silu,
    aten.sin, aten.softplus, aten.sqrt, aten.square, aten.tanh, aten.zeros_like, aten.ones_like,
)  # fmt: skip


@rule(*OTHERS)
def elementwise(call: Call) -> Iterator[Option]:
    """Cut like the result. What is broadcast along the cut stays whole."""
    for cut in call.cuts(range(len(call.shape))):
        inputs = tuple(_broadcast(cut, shape, call.shape) for shape in call.shapes)
        if any(isinstance(placement, Cut) for placement in inputs):
            yield Option(inputs, cut)


def _broadcast(cut: Cut, given: Shape, result: Shape) -> Placement:
    dim = cut.dim - (len(result) - len(given))
    return Cut(dim, cut.blocks) if dim >= 0 and given[dim] == result[cut.dim] else Replicated()


@rule(*LINEAR)
def linear_in_its_argument(call: Call) -> Iterator[Option]:
    yield from elementwise(call)
    if len(call.operands) == 1 and value(call.operands[0]).dtype == value(call.node).dtype:
        yield Option((Partial(),), Partial())  # a cast of parts would round each of them


@rule(aten.add, aten.sub)
def added(call: Call) -> Iterator[Option]:
    yield from elementwise(call)
    if len(call.operands) == 2:  # a number would be added once on each device
        yield Option((Partial(), Partial()), Partial())


@rule(aten.mul, aten.div)
def scaled(call: Call) -> Iterator[Option]:
    """Of two factors, one may be in parts."""
    yield from elementwise(call)
    if len(call.operands) == 1 and isinstance(call.node.args[0], fx.Node):
        yield Option((Partial(),), Partial())
    if len(call.operands) == 2 and not call.argument("rounding_mode"):
        yield Option((Partial(), Replicated()), Partial())
        if call.packet is aten.mul:
            yield Option((Replicated(), Partial()), Partial())


@rule(aten.where)
def chosen(call: Call) -> Iterator[Option]:
    yield from elementwise(call)
    if len(call.operands) == 3:
        yield Option((Replicated(), Partial(), Partial()), Partial())


def _divided_dropout(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """The mask depends on the place of an element in the whole tensor."""
    cut = option.output
    assert isinstance(cut, Cut)
    where = [cut.dim, cut.blocks, call.ways, int(cut.zigzag)]
    return emit(DIVIDED_DROPOUT, *args, list(call.shape), where, emit.rank)


@rule(torch.ops.piper.dropout, local=_divided_dropout)
def dropped_out(call: Call) -> Iterator[Option]:
    for cut in call.cuts(range(len(call.shape))):
        yield Option((cut, Replicated()), cut)
