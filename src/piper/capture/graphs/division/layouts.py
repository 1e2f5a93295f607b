"""Operators that read memory as it lies get the layout of the trace in a divided region, too.

What a message brings is contiguous, and a device may compute a value in another layout than the
trace did. There, `view` would fail, and `as_strided` would read other elements.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import is_contiguous, line, order_of, value
from piper.capture.graphs.division import refusals
from piper.capture.graphs.division.calls import Call, Emitter
from piper.capture.regions.layouts import BY_MEMORY, SENSITIVE, layout

aten = torch.ops.aten


def as_traced(emit: Emitter, reader: fx.Node, traced: fx.Node, made: fx.Node) -> fx.Node:
    """What a device made of a value, in the layout of the trace if its reader needs that."""
    if reader.target not in SENSITIVE or value(made).shape != value(traced).shape:
        return made
    if layout(value(made)) == layout(value(traced)) and reader.target not in BY_MEMORY:
        return made
    order = order_of(value(traced)) or tuple(range(value(traced).dim()))
    back = [order.index(dim) for dim in range(len(order))]
    moved = emit(aten.permute.default, made, list(order))
    dense = emit(aten.clone.default, moved, memory_format=torch.contiguous_format)
    return emit(aten.permute.default, dense, back)


def refuse_outside(nodes: Iterable[fx.Node]) -> None:
    """Of memory that belongs to another value, a device may not have anything."""
    for node in nodes:
        if node.target in BY_MEMORY and not _inside(Call(node, 1), value(node.args[0])):
            raise refusals.memory_of_others(line(node))


def _inside(call: Call, given: Tensor) -> bool:
    """Whether an operator reads only what lies between the elements of its argument."""
    offset = call.argument("storage_offset")
    start = 0 if offset is None else offset - given.storage_offset()
    steps = zip(call.argument("size"), call.argument("stride"), strict=True)
    last = start + sum((size - 1) * step for size, step in steps)
    dense = is_contiguous(given) or order_of(given) is not None
    own = offset is None or given.storage_offset() == 0
    return dense and own and start >= 0 and last < given.numel()
