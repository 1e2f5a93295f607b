"""The work of a graph: floating-point operations (matrix products, convolutions, attention), bytes
that other operators move, and the number of operators."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property

from torch import fx

from piper.capture.fx_nodes import storages, tensors_of, value
from piper.capture.graphs.flop_formulas import operations
from piper.capture.graphs.fusion import fused, read_elsewhere
from piper.capture.torch_private import OpOverload, is_mutable

# Operators that look up elements: the position of what they read, and of what says how much.
TABLES: dict[str, tuple[int, int | None]] = {
    "embedding": (0, None),
    "gather": (0, None),
    "index": (0, None),
    "index_select": (0, None),
    "nll_loss_forward": (0, 1),
    "nll_loss_backward": (1, 2),
}


class GraphWork:
    """The work of one graph. Its operators are looked at once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = module.graph

    @cached_property
    def flops_of(self) -> dict[fx.Node, int]:
        return {node: flops_of(node) for node in self.graph.nodes}

    @cached_property
    def kernels(self) -> list[fx.Node]:
        """Operators that launch a kernel. Views do not."""
        return list(_kernels(self.graph))

    @cached_property
    def groups(self) -> list[tuple[list[fx.Node], set[int], bool]]:
        """Groups of operators, the memory of each that others read, and whether it is a product."""
        products = {node for node in self.kernels if self.flops_of[node]}
        found = fused(self.kernels, products)
        wanted = read_elsewhere(found, self.graph.output_node().all_input_nodes)
        return [
            (group, kept, not products.isdisjoint(group))
            for group, kept in zip(found, wanted, strict=True)
        ]

    @property
    def flops(self) -> float:
        """Floating-point operations of one run. Sizes that depend on data count as 0."""
        return float(sum(self.flops_of.values()))

    @property
    def traffic(self) -> float:
        """Bytes that operators without counted FLOPs read and write in one run, unfused."""
        nodes = [node for node in self.kernels if not self.flops_of[node]]
        return float(sum(bytes_of(node) + sum(reads(node).values()) for node in nodes))

    @property
    def fused(self) -> tuple[float, int]:
        """Bytes and operators, if a compiler fuses operators without counted FLOPs."""
        moved = 0
        for group, kept, is_product in self.groups:
            if not is_product:
                made = {storage for node in group for storage in storages(node)}
                outside = {n: size for node in group for n, size in reads(node).items()}
                moved += sum(size for n, size in outside.items() if not storages(n) & made)
                moved += sum(bytes_of(node) for node in group if storages(node) & kept)
        return float(moved), len(self.groups)

    @property
    def never_written(self) -> set[int]:
        """Memory that it does not need if a compiler fuses operators: results inside a group."""
        made = ((node, kept) for group, kept, _ in self.groups for node in group)
        return {storage for node, kept in made for storage in storages(node) - kept}


def reads(node: fx.Node) -> dict[fx.Node, int]:
    """Bytes that an operator reads of each input. Looking up rows does not read the whole table."""
    found = {one: bytes_of(one) for one in node.all_input_nodes}
    table, index = TABLES.get(node.target.overloadpacket.__name__, (None, None))
    if table is not None:
        source, rows = node.args[table], node if index is None else node.args[index]
        if isinstance(source, fx.Node) and isinstance(rows, fx.Node):
            found[source] = min(found[source], bytes_of(rows))
    return found


def _kernels(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and "val" in node.meta:
            read = {s for n in node.all_input_nodes if "val" in n.meta for s in storages(n)}
            made = storages(node)
            if made and (made - read or is_mutable(node)):
                yield node


def bytes_of(node: fx.Node) -> int:
    """Bytes of all tensors of a node. Sizes that depend on data count as 0."""
    sizes = (one.numel() * one.element_size() for one in tensors_of(node))
    return sum(size for size in sizes if isinstance(size, int))


def flops_of(node: fx.Node) -> int:
    if not isinstance(node.target, OpOverload) or "val" not in node.meta:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    with suppress(Exception):  # formulas fail on unknown sizes, each with another error
        return int(operations(node.target, args, kwargs, value(node)))
    return 0
