"""Logarithms of softmax that overwrite what they are computed from, and their derivatives.

In the loss of a language model these are the largest tensors of a step: as many rows as tokens, as
many columns as words. torch's kernels read a row to the end before they write any of it, and then
each thread writes where it has just read, so the results are the same bit for bit.
"""

from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import is_contiguous, same_layout, value

aten = torch.ops.aten

INTO: dict[Any, Any] = {  # operators, and the same ones with a place for the result
    aten._log_softmax.default: aten._log_softmax.out,
    aten._log_softmax_backward_data.default: aten._log_softmax_backward_data.out,
}
_FRESH = frozenset({
    aten._to_copy.default, aten.mm.default, aten.addmm.default, aten.mul.Tensor, aten.div.Tensor,
    aten.add.Tensor, aten.nll_loss_backward.default,
})  # fmt: skip
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})


def overwritten(node: fx.Node) -> fx.Node | None:
    """The first argument, if its memory is new, nothing else reads it, and the result fits in."""
    if node.target not in INTO or node.kwargs:
        return None
    given, dim = node.args[0], node.args[-2]
    fits = same_layout(value(given), value(node)) and is_contiguous(value(given))
    last = dim in (-1, value(given).dim() - 1)
    return given if fits and last and _is_own(given) else None


def _is_own(node: fx.Node) -> bool:
    """Whether a node, or what it is a view of, is new memory with one reader."""
    if len(node.users) != 1:
        return False
    return node.target in _FRESH or (node.target in _VIEWS and _is_own(node.args[0]))


def overwrite(graph: fx.Graph) -> None:
    """Change the graph in place, while its operators have the names of torch's dispatcher."""
    for node, given in [(node, overwritten(node)) for node in graph.nodes]:
        if given is not None:
            node.target, node.kwargs = INTO[node.target], {"out": given}
