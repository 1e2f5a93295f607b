"""Counts in one form: the sum of a mask is the same in another shape and as other numbers."""

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.loss.calls import base_name
from piper.capture.loss.rules import is_elementwise

aten = torch.ops.aten
NUMBERS = (torch.int64, torch.int32, torch.float32, torch.float64)
SHAPES = (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose",
    "permute", "t", "movedim", "contiguous", "clone", "detach", "alias",
)  # fmt: skip
CONVERTS = ("to", "_to_copy", "float", "double", "type_as")


def make_plain(graph: fx.Graph) -> None:
    """Change a graph in place: what is summed need not have its shape, nor a mask its type."""
    for node in graph.find_nodes(op="call_function", target=aten.bitwise_not.default):
        _negate(node)
    for node in graph.find_nodes(op="call_function", target=aten.sum.default):
        if not node.kwargs and len(node.args) == 1:
            _strip(node, node.args[0])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _negate(node: fx.Node) -> None:
    """`~(labels == -100)` is `labels != -100`."""
    (mask,) = node.all_input_nodes
    if mask.target is aten.eq.Scalar:
        node.target, node.args = aten.ne.Scalar, mask.args


def _strip(reader: fx.Node, node: fx.Node) -> None:
    """From a sum down, through functions of each element."""
    while node.op == "call_function":
        inputs = node.all_input_nodes
        if len(inputs) != 1:
            return
        (source,) = inputs
        counted = reader.target is aten.sum.default and _is_counted(node, source)
        if counted or base_name(node) in SHAPES:
            reader.replace_input_with(node, source)
        elif is_elementwise(node) and len(node.users) == 1:
            reader = node
        else:
            return
        node = source


def _is_counted(node: fx.Node, source: fx.Node) -> bool:
    """Whether this makes numbers of a mask, in a type that counts."""
    a_mask = value(source) is not None and value(source).dtype is torch.bool
    counts = value(node) is not None and value(node).dtype in NUMBERS
    return a_mask and counts and base_name(node) in CONVERTS
