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
DIMENSIONS = {aten.conv1d: 1, aten.conv2d: 2, aten.conv3d: 3}


def _fewer_groups(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Groups that are divided are fewer on each device."""
    groups = call.argument("groups", 1)
    if groups == 1:
        return emit(call.node.target, *args, **kwargs)
    names = ("stride", "padding", "dilation")
    rest = [
        call.argument(name, default) for name, default in zip(names, ([1], [0], [1]), strict=True)
    ]
    return emit(call.node.target, *args[:2], None, *rest, groups // call.ways)


@rule(*DIMENSIONS, local=_fewer_groups)
def convolution(call: Call) -> Iterator[Option]:
    """Without a bias, [batch, channels, ...]: by outputs, by inputs, or by groups."""
    batched = len(call.shape) == DIMENSIONS[call.packet] + 2
    if len(call.operands) > 2 or not batched:
        return
    groups = call.argument("groups", 1)
    if groups > 1:
        if groups % call.ways == 0 and not call.zigzag:
            yield Option((Cut(1), Cut(0)), Cut(1))
        return
    for blocks in call.blocks:
        yield Option((Replicated(), Cut(0, blocks)), Cut(1, blocks))
        yield Option((Cut(1, blocks), Cut(1, blocks)), Partial())
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
