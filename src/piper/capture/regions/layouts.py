"""Memory layouts of values between regions.

Between regions, tensors are contiguous. A trace does not know regions, so it saw tensors in other
layouts too: transposed by attention, for example, or channels last. Operations such as `view` fail
on another layout, or mean something else. A region with such operations first restores the layout
that its inputs had in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import insert, order_of, value

aten = torch.ops.aten
BY_MEMORY = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
)  # fmt: skip
SENSITIVE = (
    aten.view.default, aten.view.dtype, aten._unsafe_view.default, aten.view_as_complex.default,
    aten.view_as_real.default, aten._reshape_alias.default, *BY_MEMORY,
)  # fmt: skip


def restored(graph: fx.Graph, node: fx.Node, traced: Tensor) -> fx.Node:
    """The contiguous node, copied to the layout of `traced`."""
    order = order_of(traced)
    if order is None:
        return node
    back = [order.index(dim) for dim in range(len(order))]
    moved = insert(graph, node, aten.permute.default, node, list(order))
    dense = insert(graph, moved, aten.clone.default, moved, memory_format=torch.contiguous_format)
    return insert(graph, dense, aten.permute.default, dense, back)


def holds(graph: fx.GraphModule, arguments: Sequence[Tensor], traced: Sequence[Tensor]) -> bool:
    """Whether the graph computes the same on contiguous arguments as on those of the trace."""
    try:
        Watching(graph, traced).run(*arguments)
    except Exception:
        return False
    return True


class Watching(fx.Interpreter):
    """Raises an error if an operation gets another layout than in the trace."""

    def __init__(self, graph: fx.GraphModule, traced: Sequence[Tensor]) -> None:
        super().__init__(graph)
        placeholders = graph.graph.find_nodes(op="placeholder")
        self.traced = dict(zip(placeholders, traced, strict=True))

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target in SENSITIVE or n.op == "output":
            for node in n.all_input_nodes:
                if layout(self.env[node]) != layout(self.traced.get(node, value(node))):
                    raise ValueError(f"{node} has another layout")
        return result


def layout(tensor: Any) -> str:
    return str(tensor.stride()) if isinstance(tensor, Tensor) else ""
