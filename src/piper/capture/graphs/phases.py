"""One graph per phase, with the arguments and results that the runtime expects."""

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import (
    closure,
    is_contiguous,
    is_symbolic,
    number_dtype,
    storages,
    value,
)
from piper.capture.graphs.joint import Joint
from piper.capture.graphs.partition import Partition
from piper.capture.torch_private import OpOverload, graph_module
from piper.names import BI, BW, B, F, Phase

aten = torch.ops.aten

Group = tuple[int, ...]  # positions of one bucket's parameters among a region's weights
Term: TypeAlias = fx.Node | list[fx.Node]  # one tensor, or a bundle


@dataclass(frozen=True)
class Layout:
    """How a region's weights are grouped into buckets, and which of these are trainable."""

    groups: tuple[Group, ...]
    trainable: tuple[bool, ...]
    gradients: tuple[str | None, ...] = field(repr=False)  # types of their sums; None: their own


class PhaseGraphs(Mapping[Phase, fx.GraphModule]):
    """The graphs of a region, each made when it is first asked for: most schedules need two."""

    def __init__(self, makers: Mapping[Phase, Callable[[], fx.GraphModule]]) -> None:
        self.makers, self.made = makers, dict[Phase, fx.GraphModule]()

    def __getitem__(self, phase: Phase) -> fx.GraphModule:
        if phase not in self.made:
            self.made[phase] = self.makers[phase]()
        return self.made[phase]

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


def phase_graphs(
    joint: Joint, cut: Partition, layout: Layout, updates: dict[int, int]
) -> PhaseGraphs:
    """Graphs of F, and of B, BI and BW where there is a backward.

    `updates`: argument that is a buffer -> result that is its new value.
    """
    groups = [[joint.arguments[i] for i in group] for group in layout.groups]
    forward = partial(_forward_graph, joint, cut, groups, updates)
    backwards = _backward_graphs(joint, cut, layout, groups) if joint.tangents else {}
    return PhaseGraphs({F: forward, **backwards})


def _forward_graph(
    joint: Joint, cut: Partition, groups: list[list[fx.Node]], updates: dict[int, int]
) -> fx.GraphModule:
    weights = sum(map(len, groups))
    forward = _Writer(joint.module)
    forward.read(*groups, *joint.arguments[weights:])
    outputs = [node for i, node in enumerate(joint.results) if i not in updates.values()]
    kept = [cut.saved] if joint.tangents else []
    forward.compute([*joint.results, *cut.saved])
    forward.keep_clear_of(joint.arguments[:weights])
    results = forward.take([*outputs, *kept])  # first: old values of buffers may be kept
    for buffer, new in updates.items():
        forward.update(joint.arguments[buffer], joint.results[new])
    return forward.finish(results)


def _backward_graphs(
    joint: Joint, cut: Partition, layout: Layout, groups: list[list[fx.Node]]
) -> dict[Phase, Callable[[], fx.GraphModule]]:
    """What makes them. Nothing is added to the joint graph after this."""
    weights = sum(map(len, groups))
    inputs = [node for node in joint.gradients[weights:] if node is not None]
    parameters: list[Term] = [
        [_gradient(joint, i, dtype) for i in group]
        for group, dtype in compress(
            zip(layout.groups, layout.gradients, strict=True), layout.trainable
        )
    ]
    reads = _reads(joint, groups, cut.backward_arguments, cut.saved, joint.tangents)
    tangents = [joint.tangents[i] for i in cut.weight_tangents]
    late = _reads(joint, groups, cut.weight_arguments, cut.carry, tangents)
    make = partial(_backward_graph, joint, cut.recomputed)
    return {
        B: partial(make, reads, [*inputs, *parameters]),
        BI: partial(make, reads, inputs, [cut.carry]),
        BW: partial(make, late, parameters),
    }


def _reads(
    joint: Joint,
    groups: list[list[fx.Node]],
    arguments: list[int],
    kept: list[fx.Node],
    tangents: list[fx.Node],
) -> list[Term]:
    """The reads of a phase: whole buckets, inputs, the kept bundle, gradients."""
    read = [joint.arguments[i] for i in arguments]
    buckets = [group for group in groups if not set(group).isdisjoint(read)]
    weights = {node for group in groups for node in group}
    return [*buckets, *(node for node in read if node not in weights), kept, *tangents]


def _backward_graph(
    joint: Joint,
    recomputed: set[fx.Node],
    reads: Sequence[Term],
    gradients: Sequence[Term],
    kept: Sequence[Term] = (),
) -> fx.GraphModule:
    writer = _Writer(joint.module)
    writer.read(*reads)
    weights = [node for node in joint.arguments if node in writer.copies]
    writer.compute(_flat([*gradients, *kept]), late=recomputed)
    shared = {storage for node in _flat([*reads, *kept]) for storage in storages(node)}
    writer.keep_clear_of(weights)
    return writer.finish([*writer.own(gradients, shared), *writer.take(kept)])


def _gradient(joint: Joint, position: int, dtype: str | None) -> fx.Node:
    """The gradient of a parameter, converted as soon as it is computed."""
    node = joint.gradients[position] or _zeros(joint, position)
    tensor = value(node)
    wanted = tensor.dtype if dtype is None else getattr(torch, dtype)
    if wanted == tensor.dtype or not tensor.is_floating_point():
        return node
    with joint.module.graph.inserting_after(node):
        converted = joint.module.graph.call_function(
            aten._to_copy.default, (node,), {"dtype": wanted}
        )
    converted.meta["val"] = tensor.to(wanted)
    return converted


def _zeros(joint: Joint, position: int) -> fx.Node:
    """A zero gradient, for a parameter that gets one only in other regions."""
    tensor = value(joint.arguments[position])
    graph = joint.module.graph
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(
            aten.zeros.default,
            (list(tensor.shape),),
            {"dtype": tensor.dtype, "device": _anywhere(tensor.device)},
        )
    node.meta["val"] = tensor
    return node


def _flat(terms: Iterable[Term]) -> list[fx.Node]:
    return [node for term in terms for node in (term if isinstance(term, list) else [term])]


def _anywhere(option: Any) -> Any:
    """Replace the device of the trace by the current one."""
    return torch.device(option.type) if isinstance(option, torch.device) else option


class _Writer:
    """Copies a part of a joint graph into a new graph."""

    def __init__(self, source: fx.GraphModule) -> None:
        self.source, self.graph = source, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.shared: set[int] = set()

    def read(self, *terms: Term) -> None:
        """One argument per term. Bundles are unpacked."""
        bundles = []
        for number, term in enumerate(terms):
            if isinstance(term, list):
                bundles.append((self.graph.placeholder(f"bundle_{number}"), term))
            else:
                self.copies[term] = self.graph.placeholder(term.name)
                self.copies[term].meta = {"val": value(term)}
        for bundle, nodes in bundles:
            bundle.meta = {"val": tuple(map(value, nodes))}
            for position, node in enumerate(nodes):
                self.copies[node] = self._unpacked(bundle, position, node)

    def compute(self, roots: Iterable[fx.Node], late: Container[fx.Node] = ()) -> None:
        """All nodes that `roots` need, in source order.

        Nodes in `late` come as late as possible, since they are recomputed to save memory.
        """
        roots = list(roots)
        needed = closure(roots, self.copies)
        for node in self.source.graph.nodes:
            if node in needed and node not in late:
                self._copy(node)
        for node in roots:
            self._copy(node)

    def _copy(self, root: fx.Node) -> None:
        waiting = [root]
        while waiting:
            node = waiting[-1]
            missing = [need for need in node.all_input_nodes if need not in self.copies]
            if node in self.copies or not missing:
                self._copy_one(waiting.pop())
            else:
                waiting += missing

    def _copy_one(self, node: fx.Node) -> None:
        if node not in self.copies:
            assert node.op != "placeholder", f"{node} is not among the arguments"
            copy = self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
            if any(isinstance(option, torch.device) for option in copy.kwargs.values()):
                copy.kwargs = {key: _anywhere(option) for key, option in copy.kwargs.items()}

    def keep_clear_of(self, nodes: Iterable[fx.Node]) -> None:
        """Results must not share memory with these nodes: parameters may be freed after use."""
        self.shared = {storage for node in nodes for storage in storages(node)}

    def take(self, terms: Iterable[Term]) -> list[fx.Node | tuple[fx.Node, ...]]:
        """Results as they are. Numbers become tensors, because bundles hold only tensors."""
        return [
            tuple(map(self._packed, term)) if isinstance(term, list) else self._packed(term)
            for term in terms
        ]

    def own(self, terms: Iterable[Term], shared: set[int]) -> list[fx.Node | tuple[fx.Node, ...]]:
        """Results with their own memory: the caller adds to them in place."""
        taken = set(shared)

        def owned(node: fx.Node) -> fx.Node:
            if storages(node).isdisjoint(taken) and is_contiguous(value(node)):
                taken.update(storages(node))
                return self.copies[node]
            return self._add(aten.clone.default, node, memory_format=torch.contiguous_format)

        return [tuple(map(owned, t)) if isinstance(t, list) else owned(t) for t in terms]

    def update(self, buffer: fx.Node, new: fx.Node) -> None:
        self.graph.call_function(aten.copy_.default, (self.copies[buffer], self.copies[new]))

    def finish(self, results: Iterable[fx.Node | tuple[fx.Node, ...]]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return graph_module(self.source, self.graph)

    def _add(self, target: OpOverload, node: fx.Node, **options: object) -> fx.Node:
        copy = self.graph.call_function(target, (self.copies[node],), dict(options))
        known = value(node)
        copy.meta = {"val": target(known, **options) if isinstance(known, Tensor) else known}
        return copy

    def _packed(self, node: fx.Node) -> fx.Node:
        if is_symbolic(node):
            return self._add(aten.scalar_tensor.default, node, dtype=number_dtype(node))
        if node.op == "placeholder":  # a buffer that this region updates: keep its old value
            return self._add(aten.clone.default, node)
        if not self.shared.isdisjoint(storages(node)):
            return self._add(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.copies[node]

    def _unpacked(self, bundle: fx.Node, position: int, node: fx.Node) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (bundle, position))
        item.meta = {"val": value(node)}
        if is_symbolic(node):
            item = self.graph.call_function(aten._local_scalar_dense.default, (item,))
            item.meta = {"val": value(node)}
        return item
