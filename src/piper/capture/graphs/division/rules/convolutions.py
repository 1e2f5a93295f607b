"""Convolutions, and norms of channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from piper.capture.graphs.division.calls import Call, Emitter, Option
from piper.capture.graphs.division.rules.table import rule
from piper.ir.placement.placements import Cut, Partial, Replicated

aten = torch.ops.aten
ROWS = 0
FORWARD = {aten.conv1d: 1, aten.conv2d: 2, aten.conv3d: 3}
TRANSPOSED = {aten.conv_transpose1d: 1, aten.conv_transpose2d: 2, aten.conv_transpose3d: 3}
DIMENSIONS = FORWARD | TRANSPOSED


def _fewer_groups(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Groups that are divided are fewer on each device."""
    groups = call.argument("groups", 1)
    by_rows = isinstance(option.output, Cut) and option.output.dim == ROWS
    if groups == 1 or by_rows:
        return emit(call.node.target, *args, **kwargs)
    stride, padding, dilation = (
        call.argument(name, default)
        for name, default in (("stride", [1]), ("padding", [0]), ("dilation", [1]))
    )
    rest = [dilation, groups // call.ways]
    if call.packet in TRANSPOSED:
        rest = [call.argument("output_padding", [0]), *reversed(rest)]
    return emit(call.node.target, *args[:2], None, stride, padding, *rest)


@rule(*DIMENSIONS, local=_fewer_groups)
def convolution(call: Call) -> Iterator[Option]:
    """Without a bias, [batch, channels, ...]: by rows, by outputs, by inputs, or by groups."""
    batched = len(call.shape) == DIMENSIONS[call.packet] + 2
    if len(call.operands) > 2 or not batched:
        return
    for cut in call.cuts((ROWS,)):
        yield Option((cut, Replicated()), cut)
    groups = call.argument("groups", 1)
    if groups > 1:
        if groups % call.ways == 0 and not call.zigzag:
            yield Option((Cut(1), Cut(0)), Cut(1))
        return
    outputs, inputs = (1, 0) if call.packet in TRANSPOSED else (0, 1)  # dimensions of the weight
    for blocks in call.blocks:
        yield Option((Replicated(), Cut(outputs, blocks)), Cut(1, blocks))
        yield Option((Cut(1, blocks), Cut(inputs, blocks)), Partial())
    yield Option((Partial(), Replicated()), Partial())
    yield Option((Replicated(), Partial()), Partial())


def _own_groups(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    return emit(call.node.target, args[0], call.argument("num_groups") // call.ways, *args[2:],
                **kwargs)  # fmt: skip


@rule(aten.group_norm, local=_own_groups)
def group_norm(call: Call) -> Iterator[Option]:
    """Every group of channels by itself."""
    if call.argument("num_groups") % call.ways == 0 and not call.zigzag:
        yield Option((Cut(1), *(Cut(0) for _ in call.operands[1:])), Cut(1))


@rule(aten.batch_norm)
def batch_norm(call: Call) -> Iterator[Option]:
    """Every channel by itself."""
    for blocks in call.blocks:
        yield Option((Cut(1, blocks), *(Cut(0, blocks) for _ in call.operands[1:])), Cut(1, blocks))
