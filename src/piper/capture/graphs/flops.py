"""The work of a graph: floating-point operations (matrix products, convolutions, attention), bytes
that other operators move, and the number of operators."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import fx

from piper.capture.fx_nodes import storages, value
from piper.capture.graphs.flop_formulas import operations
from piper.capture.torch_private import OpOverload, is_mutable, pytree


def count(module: fx.GraphModule) -> float:
    """Floating-point operations of one run. Sizes that depend on data count as 0."""
    return float(sum(map(flops_of, module.graph.nodes)))


def traffic(module: fx.GraphModule) -> float:
    """Bytes that operators without counted FLOPs read and write in one run, unfused."""
    nodes = [node for node in _kernels(module) if not flops_of(node)]
    return float(sum(bytes_of(n) for node in nodes for n in (node, *node.all_input_nodes)))


def operators(module: fx.GraphModule) -> int:
    """The number of operators that launch a kernel. Views do not."""
    return sum(1 for _ in _kernels(module))


def _kernels(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and "val" in node.meta:
            read = {s for n in node.all_input_nodes if "val" in n.meta for s in storages(n)}
            made = storages(node)
            if made and (made - read or is_mutable(node)):
                yield node


def bytes_of(node: fx.Node) -> int:
    """Bytes of all tensors of a node. Sizes that depend on data count as 0."""
    leaves = pytree.tree_leaves(value(node)) if "val" in node.meta else ()
    sizes = (
        leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor)
    )
    return sum(size for size in sizes if isinstance(size, int))


def flops_of(node: fx.Node) -> int:
    if not isinstance(node.target, OpOverload) or "val" not in node.meta:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    with suppress(Exception):  # formulas fail on unknown sizes, each with another error
        return int(operations(node.target, args, kwargs, value(node)))
    return 0
