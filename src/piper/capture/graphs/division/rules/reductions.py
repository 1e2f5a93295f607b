"""Operators that reduce dimensions, or normalize along them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Call, Emitter, Option
from piper.capture.graphs.division.rules.elementwise import elementwise
from piper.capture.graphs.division.rules.table import rule
from piper.capture.kernels.log_sums import LOG_SUM
from piper.ir.placement.placements import Cut, Partial, Replicated

aten = torch.ops.aten
NONE, MEAN = 0, 1  # reductions of losses


@rule(aten.rms_norm, aten.layer_norm)
def by_row(call: Call) -> Iterator[Option]:
    """Every row is normalized by itself. The weights' gradients are parts of a sum."""
    rows = len(call.shape) - len(call.argument("normalized_shape"))
    rest = (Replicated(),) * (len(call.operands) - 1)
    for cut in call.cuts(range(rows)):
        yield Option((cut, *rest), cut)


@rule(aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax)
def softmax(call: Call) -> Iterator[Option]:
    dim = call.dim()
    for cut in call.cuts(d for d in range(len(call.shape)) if d != dim):
        yield Option((cut,), cut)


def reduced_dims(call: Call) -> list[int]:
    return call.dims(call.argument("dim"))


def rows_kept(call: Call, keep: bool) -> Iterator[tuple[Cut, Cut]]:
    """Cuts along dimensions that are not worked along, before and after."""
    gone = reduced_dims(call)
    for cut in call.cuts(d for d in range(len(call.shapes[0])) if d not in gone):
        shift = 0 if keep else sum(dim < cut.dim for dim in gone)
        yield cut, Cut(cut.dim - shift, cut.blocks)


@rule(
    aten.all, aten.amax, aten.amin, aten.any, aten.argmax, aten.argmin, aten.linalg_vector_norm,
    aten.logsumexp, aten.nansum, aten.prod, aten.std, aten.var, LOG_SUM.overloadpacket,
)  # fmt: skip
def reduced(call: Call) -> Iterator[Option]:
    """By dimensions that stay."""
    for before, after in rows_kept(call, call.argument("keepdim", False)):
        yield Option((before,), after)


@rule(aten.aminmax, aten.std_mean, aten.var_mean)
def reduced_to_several(call: Call) -> Iterator[Option]:
    """The placement of several results is that of the argument. See `item`."""
    for before, _ in rows_kept(call, call.argument("keepdim", False)):
        yield Option((before,), before)


@rule(aten.max, aten.min)
def largest(call: Call) -> Iterator[Option]:
    """Of two tensors, or along a dimension, with the index."""
    if len(call.operands) == 2:
        yield from elementwise(call)
    elif isinstance(value(call.node), tuple):
        yield from reduced_to_several(call)


@rule(aten.cosine_similarity, aten.pairwise_distance)
def compared(call: Call) -> Iterator[Option]:
    """Two tensors along a dimension. What is broadcast stays whole."""
    left, right = call.shapes
    if len(left) != len(right) or not left:
        return
    keep = call.argument("keepdim", False)
    gone = call.dim(1) if call.packet is aten.cosine_similarity else len(left) - 1
    for cut in call.cuts(d for d in range(len(left)) if d != gone):
        full = max(left[cut.dim], right[cut.dim])
        read = tuple(cut if one[cut.dim] == full else Replicated() for one in (left, right))
        yield Option(read, Cut(cut.dim - (not keep and cut.dim > gone), cut.blocks))


@rule(aten.sum)
def summed(call: Call) -> Iterator[Option]:
    """A sum along a cut dimension gives parts."""
    yield from reduced(call)
    for cut in call.cuts(reduced_dims(call)):
        yield Option((cut,), Partial())
    yield Option((Partial(),), Partial())


def _mean(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """The mean of one piece counts as much as that of any other."""
    found = emit(call.node.target, *args, **kwargs)
    if option.output != Partial() or call.argument("reduction", MEAN) != MEAN:
        return found
    return emit(aten.div.Tensor, found, call.ways)


@rule(aten.mean, local=_mean)
def mean(call: Call) -> Iterator[Option]:
    yield from summed(call)


@rule(aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div,
      aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, local=_mean)  # fmt: skip
def loss(call: Call) -> Iterator[Option]:
    """Of each element by itself, and then perhaps their sum or mean."""
    given = call.shapes
    if any(one != given[0] for one in given):
        return  # broadcast, or with weights
    for cut in call.cuts(range(len(given[0]))):
        each = call.argument("reduction", MEAN) == NONE
        yield Option((cut,) * len(given), cut if each else Partial())
