"""Operators that work on each element by itself."""

from __future__ import annotations

from cmath import isfinite
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
    aten.abs, aten.acos, aten.acosh, aten.addcdiv, aten.addcmul, aten.asin, aten.asinh, aten.atan,
    aten.atan2, aten.atanh, aten.bitwise_and, aten.bitwise_not, aten.bitwise_or, aten.bitwise_xor,
    aten.ceil, aten.celu, aten.clamp, aten.clamp_max, aten.clamp_min, aten.cos,
    aten.cosh, aten.digamma, aten.elu, aten.eq, aten.erf, aten.erfc, aten.erfinv, aten.exp,
    aten.exp2, aten.expm1, aten.floor, aten.floor_divide, aten.fmax, aten.fmin, aten.fmod,
    aten.frac, aten.full_like, aten.ge, aten.gelu, aten.gt, aten.hardshrink, aten.hardsigmoid,
    aten.hardswish, aten.hardtanh, aten.heaviside, aten.hypot, aten.isfinite, aten.isinf,
    aten.isnan, aten.le, aten.leaky_relu, aten.lerp, aten.lgamma, aten.log, aten.log10, aten.log1p,
    aten.log2, aten.log_sigmoid, aten.logaddexp, aten.logical_and, aten.logical_not,
    aten.logical_or, aten.logical_xor, aten.logit, aten.lt, aten.masked_fill, aten.maximum,
    aten.minimum, aten.mish, aten.nan_to_num, aten.ne, aten.ones_like, aten.pow, aten.reciprocal,
    aten.relu, aten.relu6, aten.remainder, aten.round, aten.rsqrt, aten.rsub, aten.selu,
    aten.sgn, aten.sigmoid, aten.sign, aten.silu, aten.sin, aten.sinc, aten.sinh,
    aten.softplus, aten.softshrink, aten.special_expit, aten.sqrt, aten.square, aten.tan, aten.tanh,
    aten.threshold, aten.trunc, aten.xlogy, aten.zeros_like, aten.__and__, aten.__or__,
    aten.__xor__,
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
    if call.argument("rounding_mode"):
        return  # sums of whole numbers are not those of sums
    if len(call.operands) == 1 and _is_finite(call.packet, *call.node.args):
        yield Option((Partial(),), Partial())
    if len(call.operands) == 2 and call.packet is aten.mul:  # parts over 0 may be inf - inf
        yield Option((Partial(), Replicated()), Partial())
        yield Option((Replicated(), Partial()), Partial())


def _is_finite(packet: Any, given: Any, number: Any) -> bool:
    """Whether a tensor is scaled by a finite number. By another, parts of a sum give inf - inf."""
    if not isinstance(given, fx.Node):
        return False  # a number divided by a tensor
    return isfinite(number) and (number != 0 or packet is aten.mul)


@rule(aten.where)
def chosen(call: Call) -> Iterator[Option]:
    yield from elementwise(call)
    if len(call.operands) == 3:
        yield Option((Replicated(), Partial(), Partial()), Partial())


@rule(aten.prelu)
def by_channel(call: Call) -> Iterator[Option]:
    """One weight for everything, or one for each element of dimension 1."""
    many = call.shapes[1] != (1,) and len(call.shape) > 1
    for cut in call.cuts(range(len(call.shape))):
        yield Option((cut, Cut(0, cut.blocks) if many and cut.dim == 1 else Replicated()), cut)


@rule(aten.one_hot)
def one_hot(call: Call) -> Iterator[Option]:
    if call.argument("num_classes", -1) > 0:  # otherwise it depends on all indices
        yield from (Option((cut,), cut) for cut in call.cuts(range(len(call.shape) - 1)))


def _divided_dropout(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """The mask depends on the place of an element in the whole tensor."""
    cut = option.output
    assert isinstance(cut, Cut)
    where = [cut.dim, cut.blocks, call.ways, int(cut.zigzag)]
    return emit(DIVIDED_DROPOUT, *args[:4], list(call.shape), where, emit.rank, *args[4:])


@rule(torch.ops.piper.dropout, local=_divided_dropout)
def dropped_out(call: Call) -> Iterator[Option]:
    for cut in call.cuts(range(len(call.shape))):
        yield Option((cut, Replicated()), cut)
