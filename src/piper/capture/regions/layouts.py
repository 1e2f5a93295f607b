"""Layouts of what regions give each other.

Between regions tensors are contiguous. A trace, which knows of no regions, saw them as they were
made: transposed by an attention, say, or channels last. Operations such as `view` mean something
else on another layout, or fail; where a region has such, it first puts its inputs back in the
layout they were traced with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import insert, is_contiguous, value

aten = torch.ops.aten
SENSITIVE = (
    aten.view.default, aten.view.dtype, aten._unsafe_view.default, aten.as_strided.default,
    aten.view_as_complex.default, aten.view_as_real.default, aten._reshape_alias.default,
)  # fmt: skip


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost to the innermost, if the tensor has no gaps."""
    numbers = [*tensor.shape, *tensor.stride()]
    if not all(type(number) is int for number in numbers) or is_contiguous(tensor):
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d)))
    return order if is_contiguous(tensor.permute(order)) else None


def restored(graph: fx.Graph, node: fx.Node, traced: Tensor) -> fx.Node:
    """The node, which is contiguous, in the layout of `traced`."""
    order = order_of(traced)
    if order is None:
        return node
    back = [order.index(dim) for dim in range(len(order))]
    moved = insert(graph, node, aten.permute.default, node, list(order))
    dense = insert(graph, moved, aten.clone.default, moved, memory_format=torch.contiguous_format)
    return insert(graph, dense, aten.permute.default, dense, back)


def holds(graph: fx.GraphModule, arguments: Sequence[Tensor]) -> bool:
    """Whether the graph does with contiguous arguments what it did when it was traced."""
    try:
        Watching(graph).run(*arguments)
    except Exception:
        return False
    return True


class Watching(fx.Interpreter):
    """Ends with an error where an operation meets another layout than it was traced with."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target in SENSITIVE or n.op == "output":
            for node in n.all_input_nodes:
                if layout(self.env[node]) != layout(value(node)):
                    raise ValueError(f"{node} has another layout")
        return result


def layout(tensor: Any) -> str:
    return str(tensor.stride()) if isinstance(tensor, Tensor) else ""
