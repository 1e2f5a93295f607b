"""Several graphs as one. What they compute alike is computed once; Inductor fuses over borders."""

import operator
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import STRIDES, strides_of, value
from piper.capture.kernels.codegen import FUNCTIONS, METHODS, OVERWRITES, release, release_bundles
from piper.capture.kernels.unrepeatable import may_differ
from piper.capture.torch_private import OpOverload, graph_module, is_mutable, new_fake_mode, pytree

Source = int | tuple[int, int]  # an argument, or a result of an earlier graph
Sources = tuple[tuple[Source, ...], ...]  # of each graph
_PURE = frozenset({*FUNCTIONS.values(), torch.narrow, operator.getitem})
_progress = threading.local()


def joined(
    modules: Sequence[fx.GraphModule],
    reads: Sources,
    results: Sequence[tuple[int, int]],
    compiled: bool,
) -> fx.GraphModule:
    """The graphs one after the other. A bundle between two of them is taken apart here.

    What several of them compute alike is computed once: tables of positions, masks. Two results may
    then be one tensor, so this is not for backwards, whose gradients are added up in place.
    """
    updates = (is_mutable(node) for module in modules for node in module.graph.nodes)
    joiner = _Joiner(shares=not any(updates))
    joiner.take_arguments(modules, reads, described=compiled)
    for number, (module, sources) in enumerate(zip(modules, reads, strict=True)):
        if not compiled:
            joiner.graph.call_function(enter, (number,))
        joiner.add(number, module, sources)
    joiner.graph.output(tuple(joiner.made[number][k] for number, k in results))
    if not compiled:
        release_bundles(joiner.graph)
    return graph_module(joiner.attributes, joiner.graph)


def enter(number: int) -> None:
    """Note which of the graphs runs now, for the message if it fails."""
    _progress.number = number


def reached() -> int:
    """Which graph of the last joined kernel of this thread ran last."""
    return getattr(_progress, "number", 0)


class _Joiner:
    def __init__(self, shares: bool) -> None:
        self.graph, self.shares = fx.Graph(), shares
        self.known: dict[Any, fx.Node] = {}  # by operator and operands
        self.mode = new_fake_mode()
        self.arguments: dict[int, fx.Node] = {}
        self.made: list[tuple[Any, ...]] = []  # results of each graph: nodes, or tuples of them
        self.attributes: dict[str, Any] = {}

    def take_arguments(
        self, modules: Sequence[fx.GraphModule], reads: Sources, described: bool
    ) -> None:
        """Arguments in order. For Inductor, with their types; their fakes share a mode."""
        vals = {
            source: value(node) if described else ()
            for module, sources in zip(modules, reads, strict=True)
            for node, source in zip(arguments_of(module), sources, strict=True)
            if isinstance(source, int)
        }
        for source in range(max(vals, default=-1) + 1):
            node = self.arguments[source] = self.graph.placeholder(f"argument_{source}")
            node.meta["val"] = pytree.tree_map(self.like, vals.get(source, ()))

    def like(self, known: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(
                known.shape, known.stride(), dtype=known.dtype, device=known.device
            )

    def add(self, number: int, module: fx.GraphModule, sources: tuple[Source, ...]) -> None:
        copies = dict(zip(arguments_of(module), map(self.found, sources), strict=True))
        for node in module.graph.nodes:
            if node.op == "get_attr":
                name = f"of_{number}_{node.target}"
                self.attributes[name] = getattr(module, node.target)
                copies[node] = self.graph.get_attr(name)
            elif node.op not in ("placeholder", "output") and node.target is not release:
                copies[node] = self.copy(module, node, copies)
        results: Any = module.graph.output_node().args[0]
        self.made.append(tuple(self.result(one, copies) for one in results))

    def result(self, one: Any, copies: dict[fx.Node, Any]) -> Any:
        """A node, or a bundle of them."""
        return copies[one] if isinstance(one, fx.Node) else tuple(copies[item] for item in one)

    def found(self, source: Source) -> Any:
        return (
            self.arguments[source] if isinstance(source, int) else self.made[source[0]][source[1]]
        )

    def copy(self, module: fx.GraphModule, node: fx.Node, copies: dict[fx.Node, Any]) -> Any:
        first = copies[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(first, tuple):  # an item of a bundle
            return first[node.args[1]]
        key = self.shares and is_repeatable(module, node) and operands(node, copies)
        if key and key in self.known:
            return self.known[key]
        found = self.graph.node_copy(node, copies.__getitem__)
        found.meta = {STRIDES: strides_of(node)}
        if key:
            self.known[key] = found
        return found


def operands(node: fx.Node, copies: dict[fx.Node, Any]) -> Any:
    """The operator and what it is called with. Numbers as text: 1, 1.0 and True differ."""
    given = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    leaves, spec = pytree.tree_flatten(given)
    listed = tuple(leaf if isinstance(leaf, fx.Node) else repr(leaf) for leaf in leaves)
    return node.target, str(spec), listed


def is_repeatable(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether two calls with the same operands give the same result, and do nothing else."""
    target = node.target
    if any(user.target == OVERWRITES and user.args[0] is node for user in node.users):
        return False
    if node.op == "call_method":
        return target in METHODS.values()
    plain = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    return target in _PURE or (plain and not may_differ(module, node))


def arguments_of(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))
