"""Operators that reduce dimensions, or normalize along them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piper.capture.graphs.division.calls import Call, Emitter, Option
from piper.capture.graphs.division.rules.table import rule
from piper.ir.placement.placements import Cut, Partial, Replicated

aten = torch.ops.aten


@rule(aten.rms_norm, aten.layer_norm)
def by_row(call: Call) -> Iterator[Option]:
    """Every row is normalized by itself. The weights' gradients are parts of a sum."""
    rows = len(call.shape) - len(call.argument("normalized_shape"))
    rest = (Replicated(),) * (len(call.operands) - 1)
    for cut in call.cuts(range(rows)):
        yield Option((cut, *rest), cut)


@rule(aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax)
def softmax(call: Call) -> Iterator[Option]:
    dim = call.argument("dim") % len(call.shape)
    for cut in call.cuts(d for d in range(len(call.shape)) if d != dim):
        yield Option((cut,), cut)


def reduced_dims(call: Call) -> list[int]:
    size, dims = len(call.shapes[0]), call.argument("dim")
    if dims is None or dims == []:
        return list(range(size))
    return [dim % size for dim in ([dims] if isinstance(dims, int) else dims)]


@rule(aten.amax, aten.amin, aten.logsumexp, aten.var)
def reduced(call: Call) -> Iterator[Option]:
    """By dimensions that stay."""
    gone = reduced_dims(call)
    keep = call.argument("keepdim", False)
    for cut in call.cuts(d for d in range(len(call.shapes[0])) if d not in gone):
        shift = 0 if keep else sum(dim < cut.dim for dim in gone)
        yield Option((cut,), Cut(cut.dim - shift, cut.blocks))


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
    if option.output != Partial():
        return found
    return emit(aten.div.Tensor, found, call.ways)


@rule(aten.mean, local=_mean)
def mean(call: Call) -> Iterator[Option]:
    yield from summed(call)
