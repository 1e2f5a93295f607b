"""Operators that move or choose elements and compute nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from piper.capture.graphs.division.calls import Call, Emitter, Option, packet, shape, tensors
from piper.capture.graphs.division.rules.reductions import rows_kept
from piper.capture.graphs.division.rules.table import rule
from piper.capture.kernels import attention_block, ring
from piper.ir.placement.placements import Cut, Partial, local_shape

aten = torch.ops.aten
PAIRS = (torch.ops.piper.ring_passing, torch.ops.piper.attend_and_pass)  # cut alike
ALIKE = (aten.sort, aten.topk, aten.cummax, aten.cummin)  # results have the dimensions of one
REDUCED = (aten.max, aten.min, aten.aminmax, aten.std_mean, aten.var_mean)

assert ring.PASSING and attention_block.ATTEND  # which registers the operators


def _resized(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    target = aten.expand.default if call.packet is aten.expand else aten.reshape.default
    return emit(target, args[0], list(local_shape(call.shape, option.output, call.ways)))


@rule(
    aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.unsqueeze,
    aten.squeeze, local=_resized,
)  # fmt: skip
def reshaped(call: Call) -> Iterator[Option]:
    """Cut(d, b) says: flat indices are (A * b, ways, rest), with A the size of all before d.

    The same indices among the new dimensions are Cut(e, A * b / A').
    """
    if call.node.target is aten.view.dtype:
        return  # the same bytes as another type
    old, new = call.shapes[0], call.shape
    for cut in call.cuts(d for d in range(len(old)) if old[d] > 1 and 0 not in old):
        outer = prod(old[: cut.dim]) * cut.blocks
        for dim, size in enumerate(new):
            before = prod(new[:dim])
            if size > 1 and outer % before == 0 and size % (outer // before * call.ways) == 0:
                yield Option((cut,), Cut(dim, outer // before))
    yield Option((Partial(),), Partial())


@rule(aten.expand, local=_resized)
def expanded(call: Call) -> Iterator[Option]:
    old, new = call.shapes[0], call.shape
    shift = len(new) - len(old)
    for cut in call.cuts(d for d in range(len(old)) if old[d] == new[d + shift]):
        yield Option((cut,), Cut(cut.dim + shift, cut.blocks))
    yield Option((Partial(),), Partial())


@rule(aten.transpose, aten.permute, aten.t, aten.movedim, aten.swapaxes)
def permuted(call: Call) -> Iterator[Option]:
    """The operator itself shows where each dimension goes: strides of a tensor go with them."""
    size = len(call.shape)
    trial = torch.empty([2] * size, device="meta")
    moved = call.node.target(trial, *call.node.args[1:], **call.node.kwargs)
    for cut in call.cuts(range(size)):
        dim = moved.stride().index(trial.stride(cut.dim))
        yield Option((cut,), Cut(dim, cut.blocks))
    yield Option((Partial(),), Partial())


@rule(aten.select)
def selected(call: Call) -> Iterator[Option]:
    size = len(call.shapes[0])
    gone = call.dim()
    for cut in call.cuts(d for d in range(size) if d != gone):
        yield Option((cut,), Cut(cut.dim - (cut.dim > gone), cut.blocks))
    yield Option((Partial(),), Partial())


def _sliced(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Whole blocks begin at the same fraction of what each device holds."""
    dim = call.dim()
    cut = option.output
    if not isinstance(cut, Cut) or cut.dim != dim or call.shape == call.shapes[0]:
        return emit(call.node.target, *args, **kwargs)
    start = (call.argument("start") or 0) // call.ways
    return emit(aten.slice.Tensor, args[0], dim, start, start + call.shape[dim] // call.ways)


@rule(aten.slice, local=_sliced)
def sliced(call: Call) -> Iterator[Option]:
    """By other dimensions, or whole blocks of this one."""
    old, new = call.shapes[0], call.shape
    dim = call.dim()
    start = call.argument("start") or 0
    for cut in call.cuts(range(len(old))):
        if cut.dim != dim or old == new:
            yield Option((cut,), cut)
            continue
        block = old[dim] // cut.blocks
        whole = old[dim] % cut.blocks == 0 and start >= 0 and start % block == new[dim] % block == 0
        if whole and call.argument("step", 1) == 1 and new[dim]:
            yield Option((cut,), Cut(dim, new[dim] // block))
    yield Option((Partial(),), Partial())


def _split(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    dim = call.dim()
    cut = option.inputs[0]
    if not isinstance(cut, Cut) or cut.dim != dim or call.packet is aten.unbind:
        return emit(call.node.target, *args, **kwargs)
    sizes = [tensor.shape[dim] // call.ways for tensor in tensors(call.node)]
    return emit(aten.split_with_sizes.default, args[0], sizes, dim)


@rule(aten.split, aten.chunk, aten.split_with_sizes, aten.unbind, local=_split)
def split(call: Call) -> Iterator[Option]:
    """The placement of several results is that of the tensor that is split. See `item`."""
    given = call.shapes[0]
    dim = call.dim()
    for cut in call.cuts(range(len(given))):
        if cut.dim != dim or (call.packet is not aten.unbind and _in_blocks(call, cut)):
            yield Option((cut,), cut)
    yield Option((Partial(),), Partial())


def _in_blocks(call: Call, cut: Cut) -> bool:
    given = call.shapes[0][cut.dim]
    block = given // cut.blocks
    sizes = [tensor.shape[cut.dim] for tensor in tensors(call.node)]
    return given % cut.blocks == 0 and all(size and size % block == 0 for size in sizes)


def _item(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Of results that are nodes of their own, one of these."""
    several, index = args
    return several[index] if isinstance(several, tuple) else emit(operator.getitem, several, index)


@rule(operator.getitem, local=_item)
def item(call: Call) -> Iterator[Option]:
    """One of several results, with as many blocks as it has."""
    several = call.operands[0]
    if packet(several) in PAIRS:
        yield from (Option((cut,), cut) for cut in call.cuts(range(len(call.shape) - 1)))
        return
    made = Call(several, call.ways, call.blocks)
    if packet(several) in ALIKE:
        yield from (Option((cut,), cut) for cut in call.cuts(range(len(call.shape))))
        return
    if packet(several) in REDUCED:
        keep = made.argument("keepdim", False)
        yield from (Option((before,), after) for before, after in rows_kept(made, keep))
        return
    if packet(several) not in (aten.split, aten.chunk, aten.split_with_sizes, aten.unbind):
        return
    given = shape(several.all_input_nodes[0])
    dim = made.dim()
    for cut in call.cuts(range(len(given))):
        if cut.dim != dim:
            gone = len(call.shape) < len(given) and cut.dim > dim
            yield Option((cut,), Cut(cut.dim - gone, cut.blocks))
        elif packet(several) is not aten.unbind and _in_blocks(made, cut):
            yield Option((cut,), Cut(dim, call.shape[dim] * cut.blocks // given[dim]))
    yield Option((Partial(),), Partial())


@rule(aten.cat)
def concatenated(call: Call) -> Iterator[Option]:
    count, size = len(call.operands), len(call.shape)
    dim = call.argument("dim", 0) % size
    if any(len(given) != size for given in call.shapes):
        return  # empty tensors
    for cut in call.cuts(d for d in range(size) if d != dim):
        yield Option((cut,) * count, cut)
    if len({given[dim] for given in call.shapes}) == 1:
        yield Option((Cut(dim),) * count, Cut(dim, count))
    yield Option((Partial(),) * count, Partial())


@rule(aten.stack)
def stacked(call: Call) -> Iterator[Option]:
    count, size = len(call.operands), len(call.shape)
    dim = call.argument("dim", 0) % size
    for cut in call.cuts(range(size - 1)):
        yield Option((cut,) * count, Cut(cut.dim + (cut.dim >= dim), cut.blocks))
    yield Option((Partial(),) * count, Partial())
