"""Which nodes of the forward the backward recomputes, instead of reading what the forward kept."""

import operator

from torch import fx

from piper.capture.graphs.joint import Joint
from piper.capture.kernels.unrepeatable import may_differ
from piper.capture.trace.functions import RECOMPUTE


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
