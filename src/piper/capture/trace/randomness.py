"""Random operations of a model: dropouts become reproducible, others are not supported."""

import torch
from torch import fx

from piper.capture.kernels.dropout import DROPOUT
from piper.capture.torch_private import argument_names
from piper.capture.trace import refusals
from piper.capture.trace.forward import Traced

aten = torch.ops.aten


def make_reproducible(traced: Traced) -> None:
    """Number the dropouts of the model and let each read `traced.random`."""
    numbered = 0
    for node in list(traced.root.graph.nodes):
        if node.target is aten.dropout.default:
            numbered += _replace(traced, node, numbered)
        elif _is_random(node):
            raise refusals.random_operation(node)


def _replace(traced: Traced, node: fx.Node, number: int) -> bool:
    """Return whether the dropout has an effect, and so takes a number."""
    x, p, training = node.args
    active = bool(training) and p > 0
    if active:
        with traced.root.graph.inserting_before(node):
            arguments = (x, _random(traced), number, p)
            result = traced.root.graph.call_function(DROPOUT, arguments)
        result.meta = node.meta
    else:
        result = x
    node.replace_all_uses_with(result)
    traced.root.graph.erase_node(node)
    return active


def _random(traced: Traced) -> fx.Node:
    """The argument with the random seed, added to the graph when it is first needed."""
    if traced.random is None:
        last = traced.placeholders[-1]
        with traced.root.graph.inserting_after(last), traced.mode:
            traced.random = traced.root.graph.placeholder("random")
            # One more element than the caller passes: kernels add the number of their dropout.
            traced.random.meta["val"] = torch.empty(3, dtype=torch.int64, device=traced.device)
    return traced.random


def _is_random(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Attention and recurrent layers are tagged because of their dropout.
    names = argument_names(node)
    probability = next((name for name in ("dropout_p", "dropout") if name in names), None)
    if probability is None:
        return True
    given = [*node.args, *(None for _ in names)][names.index(probability)]
    return (given or node.kwargs.get(probability) or 0.0) != 0.0
