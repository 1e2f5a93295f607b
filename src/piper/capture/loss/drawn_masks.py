"""Counts of masks that a model draws at random.

A step has draws of its own, which nobody knows beforehand. A masked autoencoder draws only an
order: so many tokens of each row count, whichever they are.
"""

import operator

import torch
from torch import fx

from piper.capture.fx_nodes import arguments
from piper.capture.loss.calls import base_name, shape
from piper.capture.loss.rules import is_elementwise
from piper.capture.trace.decisions.shared_draws import is_random

aten = torch.ops.aten
ALIKE = ("to", "_to_copy", "clone", "detach", "alias", "contiguous", "type_as")


def without_orders(graph: fx.Graph) -> None:
    """Change a graph in place: what is summed need not be put in another order before."""
    for node in graph.nodes:
        if node.target is aten.sum.default:
            _drop_order(node.args[0])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def is_drawn(graph: fx.Graph) -> bool:
    return any(map(is_random, graph.nodes))


def _drop_order(summed: fx.Node) -> None:
    """Through functions of each element, that only this sum reads."""
    node = summed
    while len(node.users) == 1 and node.op == "call_function":
        if _is_permuted(node):
            node.replace_all_uses_with(node.args[0])
            return
        inputs = node.all_input_nodes
        alike = is_elementwise(node) or base_name(node) in ALIKE
        if not alike or len(inputs) != 1 or shape(inputs[0]) != shape(node):
            return
        (node,) = inputs


def _is_permuted(node: fx.Node) -> bool:
    """Whether each element of a tensor is taken once, along one dimension."""
    if node.target is not aten.gather.default:
        return False
    given = arguments(node)
    index, size = given["index"], shape(given["self"])
    while base_name(index) in ALIKE:
        index = index.args[0]
    maker = index.args[0] if index.target is operator.getitem and index.args[1] == 1 else index
    if base_name(maker) not in ("argsort", "sort") or (maker is index) == (
        base_name(maker) == "sort"
    ):
        return False
    along = arguments(maker).get("dim", -1) % max(1, len(size))
    return shape(index) == size and given["dim"] % max(1, len(size)) == along
