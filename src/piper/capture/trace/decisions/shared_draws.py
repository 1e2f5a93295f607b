"""Random numbers that all rows of a step share: those whose size does not depend on the batch.

Plain training on a whole batch draws such numbers once. So all microbatches must have the same
ones. Sizes alone do not say which these are: a tensor of [tokens] may have as many elements as the
batch has rows. So the model is traced with another number of rows.
"""

from collections.abc import Callable

import torch
from torch import fx

from piper.capture.fx_nodes import closure, value
from piper.capture.torch_private import fake_errors_unlogged

ONCE = "piper_once"  # in the meta of random nodes: the same numbers for all rows of a step


def mark_shared(root: fx.GraphModule, other_rows: Callable[[], fx.GraphModule]) -> None:
    """Mark the draws that all rows share. `other_rows` traces with another number of rows."""
    drawn = draws(root.graph)
    sized = [node for node in drawn if value(node).dim()]
    for node in drawn:
        if node not in sized:
            node.meta[ONCE] = True
    if not sized:
        return
    try:
        with fake_errors_unlogged():
            others = [node for node in draws(other_rows().graph) if value(node).dim()]
    except Exception:  # the model takes only one number of rows
        return
    if [node.target for node in sized] == [node.target for node in others]:
        for node, other in zip(sized, others, strict=True):
            if value(node).shape == value(other).shape:
                node.meta[ONCE] = True


def draws(graph: fx.Graph) -> list[fx.Node]:
    """Random operations on nothing that is given, so that their shape alone may be."""
    random = [node for node in graph.nodes if is_random(node) and not node.meta.get(ONCE)]
    return [
        node
        for node in random
        if all(need.op != "placeholder" for need in closure([node], stop=()))
    ]


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
