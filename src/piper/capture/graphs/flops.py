"""How much work a graph is: arithmetic (matrix products, convolutions, attention), bytes that other
operators move, and how many operators there are."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from piper.capture.fx_nodes import storages, value
from piper.capture.torch_private import OpOverload, is_mutable, pytree


def count(module: fx.GraphModule) -> float:
    """Floating-point operations of one run. Sizes that depend on data count nothing."""
    return float(sum(map(_flops, module.graph.nodes)))


def traffic(module: fx.GraphModule) -> float:
    """Bytes that operators without arithmetic read and write in one run, each by itself."""
    nodes = [node for node in _kernels(module) if not _flops(node)]
    return float(sum(_bytes(n) for node in nodes for n in (node, *node.all_input_nodes)))


def operators(module: fx.GraphModule) -> int:
    """How many operators do something: views only look at memory in another way."""
    return sum(1 for _ in _kernels(module))


def _kernels(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and "val" in node.meta:
            read = {s for n in node.all_input_nodes if "val" in n.meta for s in storages(n)}
            made = storages(node)
            if made and (made - read or is_mutable(node)):
                yield node


def _bytes(node: fx.Node) -> int:
    """Of all tensors of a node; sizes that depend on data count nothing."""
    leaves = pytree.tree_leaves(value(node)) if "val" in node.meta else ()
    sizes = (
        leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor)
    )
    return sum(size for size in sizes if isinstance(size, int))


def _flops(node: fx.Node) -> int:
    if not isinstance(node.target, OpOverload):
        return 0
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    with suppress(Exception):  # the formulas refuse unknown sizes, each in its own way
        return int(formula(*args, **kwargs, out_val=value(node)))
    return 0
