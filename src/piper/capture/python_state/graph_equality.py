"""Whether two graphs compute the same: nodes are numbered by what they compute."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.torch_private import (
    ENTER_AUTOCAST,
    MODE_SWITCHES,
    constant_of,
    is_real,
    pytree,
)

SMALL = 2**20  # elements of a constant that are compared by value

Numbers = dict[fx.Node, int]


class Numbering:
    """Gives the same number to nodes of any graph that compute the same from the same inputs."""

    def __init__(self) -> None:
        self.table: dict[Any, int] = {}

    def of(
        self,
        root: fx.GraphModule,
        known: Mapping[int, Any] | None = None,
        stands: Mapping[fx.Node, fx.Node] | None = None,
        valued: Mapping[fx.Node, Any] | None = None,
    ) -> Numbers:
        """The number of each node.

        `known` says what constants stand for, by id. `stands`: nodes that are other nodes.
        `valued`: what nodes are, however they are computed.
        """
        numbers: Numbers = {}
        inputs = 0
        for node in root.graph.nodes:
            if stands and node in stands:
                key: Any = numbers[stands[node]]
            elif valued and node in valued:
                key = valued[node]
            elif node.op == "placeholder":
                key = ("input", inputs)
                inputs += 1
            elif node.op == "get_attr":
                key = _constant(attribute(root, node), known or {})
            else:
                key = (node.op, node.target, _frozen((node.args, node.kwargs), numbers.get))
            numbers[node] = self.number(key)
        return numbers

    def number(self, key: Any) -> int:
        if isinstance(key, int):
            return key
        return self.table.setdefault(key, len(self.table))


def computed_alike(node: fx.Node, number: Callable[[fx.Node], Any]) -> Any:
    """The same for nodes of one graph that must compute the same; else, the node itself.

    `number`: that of its arguments. Random numbers differ, and so may the results of any operator
    that is not torch's own. autocast changes what operators compute.
    """
    own = node.target is operator.getitem or getattr(node.target, "namespace", "") == "aten"
    random = torch.Tag.nondeterministic_seeded in _tags(node)
    converted = node.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST, sort=False)
    if node.op != "call_function" or not own or random or converted:
        return node
    return node.target, _frozen((node.args, node.kwargs), number)


def switches(root: fx.GraphModule) -> list[Any]:
    """Changes of no_grad and autocast, which act on the nodes after them."""
    found = (node for node in root.graph.nodes if node.target in MODE_SWITCHES)
    return [(node.target, repr(node.args)) for node in found]


def depends_on_inputs(node: fx.Node) -> bool:
    """Whether a node is computed from parameters, buffers or the batch."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" or torch.Tag.nondeterministic_seeded in _tags(one):
            return True
        stack += [other for other in one.all_input_nodes if other not in seen]
        seen.update(one.all_input_nodes)
    return False


def _tags(node: fx.Node) -> Any:
    return getattr(node.target, "tags", ())


def attribute(root: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(root)


def _constant(value: Any, known: Mapping[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    real = constant_of(value) if isinstance(value, Tensor) else None
    if real is None or not is_real(real) or real.numel() > SMALL or real.is_meta:
        return ("constant", id(value))
    return ("constant", tuple(real.shape), real.dtype, repr(real.detach().flatten().tolist()))


def _frozen(value: Any, number: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a node as a key, with numbers in place of nodes."""
    leaves, spec = pytree.tree_flatten(value)
    found = [("node", number(x)) if isinstance(x, fx.Node) else (type(x), repr(x)) for x in leaves]
    return str(spec), *found
