"""Whether inputs with rows of their own meet only in numbers, as those of a GAN do in its loss.

Real images and noise may have different sizes. If each is reduced over its rows before they meet,
both are cut: whether the losses of microbatches add up then is proved or tested as for any loss.
A table whose rows are looked up meets the batch before.
"""

from collections.abc import Mapping

from torch import Tensor, fx

from piper.capture.fx_nodes import value
from piper.capture.torch_private import pytree


def meet_in_numbers(graph: fx.Graph, sizes: Mapping[fx.Node, int]) -> bool:
    """`sizes`: the first size of each input, which divides no other size of the graph."""
    rows = frozenset(sizes.values())
    behind: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        inputs = [one for one in node.all_input_nodes if behind[one]]
        own = [frozenset({sizes[node]})] if node in sizes else []
        behind[node] = frozenset[int]().union(*own, *(behind[one] for one in inputs))
        if len(behind[node]) > 1 and any(_has(one, rows) for one in (node, *inputs)):
            return False
    return True


def _has(node: fx.Node, rows: frozenset[int]) -> bool:
    """Whether a dimension runs over rows, perhaps beside others, or is not known."""
    leaves = (leaf for leaf in pytree.tree_leaves(value(node)) if isinstance(leaf, Tensor))
    sizes = (size for leaf in leaves for size in leaf.shape)
    return any(not isinstance(n, int) or any(n % own == 0 for own in rows) for n in sizes)
