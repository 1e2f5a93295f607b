"""Graphs as functions that the runtime calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from piper.capture.dropout import KEEP, keep
from piper.capture.fastcode import quickened, release
from piper.capture.nodes import is_symbolic, value
from piper.capture.torch_private import compile_graph
from piper.names import Phase

Kernel = Callable[..., tuple]


@dataclass
class Kernels:
    """The functions of all regions, made when first asked for; equal code is made once."""

    graphs: dict[str, dict[Phase, fx.GraphModule]]
    made: dict[tuple[str, Phase, bool], Kernel] = field(default_factory=dict)

    def get(self, code: str, phase: Phase, compiled: bool) -> Kernel:
        key = code, phase, compiled
        if key not in self.made:
            graph = self.graphs[code][phase]
            # Inductor would compile again for every new size.
            fixed = not any(map(is_symbolic, graph.graph.nodes))
            made = _compiled(graph) if compiled and fixed else quickened(graph).forward
            self.made[key] = made
        return self.made[key]


def numbered(kernel: Kernel, position: int, first: int) -> Kernel:
    """A kernel whose dropouts count from `first`: equal regions differ in this alone."""

    def call(*reads: Any) -> tuple:
        random = functional.pad(reads[position], (0, 1), value=first)
        return kernel(*reads[:position], random, *reads[position + 1 :])

    return call


def _compiled(module: fx.GraphModule) -> Kernel:
    """By Inductor, and without Dynamo in front: what comes in is known, and needs no guards."""
    flat = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    items: dict[fx.Node, list[fx.Node]] = {}

    def argument(name: str, val: Any) -> fx.Node:
        node = flat.placeholder(name)
        node.meta["val"] = val
        return node

    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(value(node), tuple):
            vals = enumerate(value(node))
            items[node] = [argument(f"{node.name}_{i}", val) for i, val in vals]
        else:
            copies[node] = argument(node.name, value(node))
    for node in module.graph.nodes:
        if node.op == "call_function" and node.args and node.args[0] in items:
            copies[node] = items[node.args[0]][node.args[1]]
        elif node.op not in ("placeholder", "output"):
            copies[node] = flat.node_copy(node, copies.__getitem__)
    results, structure = pytree.tree_flatten(module.graph.output_node().args[0])
    flat.output(tuple(copies[node] for node in results))
    return _packing(compile_graph(fx.GraphModule(module, flat), {KEEP: keep}), structure)


def _packing(kernel: Callable[..., Any], structure: pytree.TreeSpec) -> Kernel:
    """Takes bundles apart and puts them together again around a function of plain tensors."""

    def call(*reads: Any) -> tuple:
        flat: list = []
        for read in reads:
            if isinstance(read, tuple | list):
                flat += read
                release(read)
            else:
                flat.append(read)
        return pytree.tree_unflatten(kernel(*flat), structure)

    return call
