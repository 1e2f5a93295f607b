"""Graphs as functions that the runtime calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import fx
from torch.nn import functional

from piper.capture.fx_nodes import is_symbolic, value
from piper.capture.inductor_private import compile_graph
from piper.capture.kernels import shipping
from piper.capture.kernels.codegen import quickened, release
from piper.capture.kernels.joining import Sources, joined
from piper.capture.kernels.random_operators import INSIDE
from piper.capture.torch_private import (
    below_autograd,
    function_of,
    graph_module,
    is_plain,
    pytree,
)
from piper.names import F, Phase

Kernel = Callable[..., tuple]
Key = tuple[str, Phase, bool]  # code, phase, whether it goes through Inductor
Result = tuple[int, int]  # number of a graph, and which of its results
Pick = tuple[Any, int | None]  # an argument; of random numbers, also a region's first dropout
Joint = tuple[tuple[str, ...], Sources, tuple[Result, ...], bool]  # graphs, flow, if compiled


@dataclass(frozen=True, slots=True)
class RegionCode:
    """What computes a region. Regions of equal code differ in their dropouts alone."""

    code: str
    ways: int = 1  # shares of its experts, of which this computes one
    dropout: int = 0  # number of its first dropout
    random: tuple[tuple[Phase, int], ...] = ()  # the read of a phase that random numbers start from

    @property
    def graph(self) -> str:
        """What its graphs are known by."""
        return self.code if self.ways == 1 else f"{self.code}/{self.ways}"


@dataclass
class Kernels:
    """The functions of all regions, made when first asked for; equal code is made once."""

    graphs: dict[str, Mapping[Phase, fx.GraphModule]] = field(default_factory=dict)
    made: dict[Key, Kernel] = field(default_factory=dict)
    quick: dict[tuple[str, Phase], fx.GraphModule] = field(default_factory=dict)
    came: dict[Key, fx.GraphModule] = field(default_factory=dict)  # from another process
    joined: dict[Joint, Kernel] = field(default_factory=dict)

    def get(self, region: RegionCode, phase: Phase, compiled: bool) -> Kernel:
        """What computes a phase of a region."""
        key, random = (region.graph, phase, compiled), dict(region.random).get(phase)
        if key not in self.made:
            self.made[key] = self._received(key) if key in self.came else self._own(key)
        kernel = self.made[key]
        return kernel if random is None else numbered(kernel, random, region.dropout)

    def can_join(self, region: RegionCode, compiled: bool) -> bool:
        """Whether its forward can be one kernel with those of its neighbours."""
        key = region.graph, F, True
        if not compiled:
            return True
        return shipping.is_described(self.came[key]) if key in self.came else self._is_fused(*key)

    def join(
        self,
        regions: Sequence[RegionCode],
        reads: Sources,
        results: tuple[Result, ...],
        compiled: bool,
    ) -> Kernel:
        """One kernel for the forwards of several regions. Equal sequences share it.

        Random numbers are arguments of their own: equal regions differ in them.
        """
        picked: dict[Pick, int] = {}
        rows = tuple(
            tuple(
                one if isinstance(one, tuple) else picked.setdefault(pick, len(picked))
                for one, pick in zip(row, picks(region, row), strict=True)
            )
            for region, row in zip(regions, reads, strict=True)
        )
        key = tuple(region.graph for region in regions), rows, results, compiled
        if key not in self.joined:
            modules = [self._forward(region.graph, compiled) for region in regions]
            self.joined[key] = _function(joined(modules, rows, results, compiled), fused=compiled)
        return picking(self.joined[key], list(picked))

    def _forward(self, code: str, compiled: bool) -> fx.GraphModule:
        found = self.came.get((code, F, compiled))
        if found is not None:
            return found
        return self.graphs[code][F] if compiled else self._quick(code, F)

    def _own(self, key: Key) -> Kernel:
        code, phase, _ = key
        fused = self._is_fused(*key)
        return _function(self.graphs[code][phase] if fused else self._quick(code, phase), fused)

    def _received(self, key: Key) -> Kernel:
        module = self.came[key]
        return _function(module, shipping.is_described(module))

    def to_json(self, code: str, phase: Phase, compiled: bool) -> str:
        """A kernel for another process, which need not capture anything."""
        if self._is_fused(code, phase, compiled):
            return shipping.to_json(self.graphs[code][phase], described=True)
        return shipping.to_json(self._quick(code, phase))

    def add(self, code: str, phase: Phase, compiled: bool, text: str) -> None:
        """A kernel that another process captured. It is compiled here, when it is asked for: then
        that process compiles it, too, and does not wait for this one before."""
        self.came[code, phase, compiled] = shipping.from_json(text)

    def _is_fused(self, code: str, phase: Phase, compiled: bool) -> bool:
        """Inductor would compile again for every new size that the graph computes with."""
        graph = self.graphs[code][phase]
        fixed = not any(map(is_symbolic, graph.graph.nodes))
        return compiled and fixed and shipping.can_be_described(graph)

    def _quick(self, code: str, phase: Phase) -> fx.GraphModule:
        if (code, phase) not in self.quick:
            self.quick[code, phase] = quickened(self.graphs[code][phase])
        return self.quick[code, phase]


def numbered(kernel: Kernel, position: int, first: int) -> Kernel:
    """A kernel whose dropouts count from `first`: equal regions differ in this alone."""

    def call(*reads: Any) -> tuple:
        random = functional.pad(reads[position], (0, 1), value=first)
        return kernel(*reads[:position], random, *reads[position + 1 :])

    return call


def picks(region: RegionCode, reads: Sequence[Any]) -> list[Pick]:
    """What a region reads of the arguments of a sequence."""
    position = dict(region.random).get(F)
    return [(one, region.dropout if k == position else None) for k, one in enumerate(reads)]


def picking(kernel: Kernel, wanted: Sequence[Pick]) -> Kernel:
    """A kernel of arguments that are picked from those given."""
    if wanted == [(k, None) for k in range(len(wanted))]:
        return kernel

    def call(*reads: Any) -> tuple:
        return kernel(
            *[reads[k] if first is None else counted(reads[k], first) for k, first in wanted]
        )

    return call


def counted(random: Any, first: int) -> Any:
    """What random numbers start from, and the number of a region's first dropout."""
    seed = random[0] if isinstance(random, list) else random  # in a list if nothing else reads it
    return functional.pad(seed, (0, 1), value=first)


def _function(module: fx.GraphModule, fused: bool) -> Kernel:
    """Call operators below autograd if that is safe: it saves asking autograd at each call."""
    kernel: Kernel = _compiled(module) if fused else function_of(module)
    if not is_plain(module.graph):
        return kernel

    def call(*reads: Any) -> tuple:
        with below_autograd():
            return kernel(*reads)

    return call


def _compiled(module: fx.GraphModule) -> Kernel:
    """Compiled by Inductor, without Dynamo: the inputs are known, so guards are not needed."""
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
    results: Any = module.graph.output_node().args[0]
    sizes = [len(one) if isinstance(one, tuple | list) else None for one in results]
    flat.output(tuple(copies[node] for node in pytree.tree_leaves(results)))
    return _packing(compile_graph(graph_module(module, flat), INSIDE), sizes)


def _packing(kernel: Callable[[list[Any]], Any], sizes: Sequence[int | None]) -> Kernel:
    """Wrap a function of a list of tensors: unpack its bundles, and pack its results.

    The kernel empties the list, so that tensors which only it has die after their last use.

    `sizes` are those of the result bundles (None: not a bundle).
    """

    def call(*reads: Any) -> tuple:
        flat: list = []
        for read in reads:
            if isinstance(read, tuple | list):
                flat += read
                release(read)
            else:
                flat.append(read)
        left = iter(kernel(flat))
        return tuple(next(left) if size is None else tuple(islice(left, size)) for size in sizes)

    return call
