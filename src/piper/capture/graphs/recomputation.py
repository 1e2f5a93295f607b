"""Which nodes of the forward the backward recomputes, instead of reading what the forward kept."""

import operator

import torch
from torch import fx

from piper.capture.graphs.joint import Joint
from piper.capture.torch_private import OpOverload
from piper.capture.trace.functions import RECOMPUTE

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


def checkpointed(joint: Joint, backward: set[fx.Node]) -> set[fx.Node]:
    """Nodes inside torch.utils.checkpoint, except those whose results leave it."""
    return {
        node
        for node in joint.module.graph.nodes
        if node not in backward
        and checkpoint_of(node) is not None
        and all(
            user in backward or checkpoint_of(user) == checkpoint_of(node) for user in node.users
        )
    }


def checkpoint_of(node: fx.Node) -> int | None:
    """The number of the torch.utils.checkpoint that a node is inside of."""
    found: int | None = node.meta.get("custom", {}).get(RECOMPUTE)
    return found


def mark_checkpoint(node: fx.Node, number: int) -> None:
    node.meta["custom"] = {RECOMPUTE: number}


def repeatable(joint: Joint, backward: set[fx.Node]) -> set[fx.Node]:
    """All nodes of the forward, except those that may differ when they are run again."""
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    kept = {node for node in calls if may_differ(joint.module, node)}
    picks = {user for node in kept for user in node.users if user.target is operator.getitem}
    return set(calls) - backward - kept - picks


def may_differ(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node, or one of the graphs that it calls (branches), has such an operator."""
    if isinstance(node.target, OpOverload):
        packet = node.target.overloadpacket
        return packet in MAY_DIFFER or str(packet) in KEPT
    inner = [getattr(module, n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [graph for graph in inner if isinstance(graph, fx.GraphModule)]
    return any(may_differ(graph, one) for graph in graphs for one in graph.graph.nodes)
