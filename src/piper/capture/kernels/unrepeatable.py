"""Operators whose results may differ when they are run again."""

import torch
from torch import fx

from piper.capture.torch_private import OpOverload

aten = torch.ops.aten

# Blocks of a ring: their keys and values are elsewhere by then, so a little is kept instead.
KEPT = frozenset({"piper.largest_scores"})

# Run again on the same inputs, these may give other bits on a GPU: equal elements come in another
# order, or atomic additions do. Operators that draw random numbers are missing: capture supports
# none but dropout, which depends on a counter alone.
MAY_DIFFER = frozenset({
    aten.topk, aten.sort, aten.kthvalue, aten.mode, aten.median, aten.nanmedian,
    aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_add, aten.index_copy,
    aten.index_put, aten.index_reduce, aten.put, aten.cumsum, aten.histc, aten.bincount,
    aten.nll_loss2d_forward,
})  # fmt: skip


def may_differ(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node, or one of the graphs that it calls (branches), has such an operator."""
    if isinstance(node.target, OpOverload):
        packet = node.target.overloadpacket
        return packet in MAY_DIFFER or str(packet) in KEPT
    inner = [getattr(module, n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [graph for graph in inner if isinstance(graph, fx.GraphModule)]
    return any(may_differ(graph, one) for graph in graphs for one in graph.graph.nodes)
