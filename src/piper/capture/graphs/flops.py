"""The work of a graph: floating-point operations (matrix products, convolutions, attention), bytes
that other operators move, and the number of operators."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import fx

from piper.capture.fx_nodes import storages, value
from piper.capture.graphs.flop_formulas import operations
from piper.capture.graphs.fusion import fused, read_elsewhere
from piper.capture.torch_private import OpOverload, is_mutable, pytree

# Operators that look up elements: the position of what they read, and of what says how much.
TABLES: dict[str, tuple[int, int | None]] = {
    "embedding": (0, None),
    "gather": (0, None),
    "index": (0, None),
    "index_select": (0, None),
    "nll_loss_forward": (0, 1),
    "nll_loss_backward": (1, 2),
}


def count(module: fx.GraphModule) -> float:
    """Floating-point operations of one run. Sizes that depend on data count as 0."""
    return float(sum(map(flops_of, module.graph.nodes)))


def traffic(module: fx.GraphModule) -> float:
    """Bytes that operators without counted FLOPs read and write in one run, unfused."""
    nodes = [node for node in _kernels(module) if not flops_of(node)]
    return float(sum(bytes_of(node) + sum(reads(node).values()) for node in nodes))


def fused_work(module: fx.GraphModule) -> tuple[float, int]:
    """Bytes and operators, if a compiler fuses operators without counted FLOPs."""
    groups, moved = list(_fused(module)), 0
    for group, kept, is_product in groups:
        if not is_product:
            made = {storage for node in group for storage in storages(node)}
            outside = {n: size for node in group for n, size in reads(node).items()}
            moved += sum(size for n, size in outside.items() if not storages(n) & made)
            moved += sum(bytes_of(node) for node in group if storages(node) & kept)
    return float(moved), len(groups)


def never_written(module: fx.GraphModule) -> set[int]:
    """Memory that a graph does not need if a compiler fuses operators: results inside a group."""
    made = ((node, kept) for group, kept, _ in _fused(module) for node in group)
    return {storage for node, kept in made for storage in storages(node) - kept}


def _fused(module: fx.GraphModule) -> Iterator[tuple[list[fx.Node], set[int], bool]]:
    """Groups of operators, the memory of each that others read, and whether it is a product."""
    kernels = list(_kernels(module))
    products = {node for node in kernels if flops_of(node)}
    groups = fused(kernels, products)
    wanted = read_elsewhere(groups, module.graph.output_node().all_input_nodes)
    for group, kept in zip(groups, wanted, strict=True):
        yield group, kept, not products.isdisjoint(group)


def reads(node: fx.Node) -> dict[fx.Node, int]:
    """Bytes that an operator reads of each input. Looking up rows does not read the whole table."""
    found = {one: bytes_of(one) for one in node.all_input_nodes}
    table, index = TABLES.get(node.target.overloadpacket.__name__, (None, None))
    if table is not None:
        source, rows = node.args[table], node if index is None else node.args[index]
        if isinstance(source, fx.Node) and isinstance(rows, fx.Node):
            found[source] = min(found[source], bytes_of(rows))
    return found


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
