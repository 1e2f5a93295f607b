"""From one graph to one graph per region, with explicit inputs and outputs."""

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from piper.capture.fx_nodes import (
    insert,
    is_contiguous,
    is_symbolic,
    line,
    order_of,
    storages,
    value,
)
from piper.capture.kernels.random_operators import RANDOM_OPERATORS
from piper.capture.marks.annotate import Path
from piper.capture.marks.runs import Piece, Run, find_runs, path_of
from piper.capture.regions import layouts
from piper.capture.torch_private import graph_module, is_mutable
from piper.capture.trace.forward import Traced
from piper.capture.trace.grad_modes import Mode, Switch, modes_of

aten = torch.ops.aten


@dataclass
class Chunk:
    """The forward graph of one region. Inputs and outputs are nodes of the whole graph.

    The graph's arguments are the weights, then the inputs; its results are the outputs, then the
    new values of buffers. All of them are contiguous.
    """

    path: Path
    body: list[fx.Node]
    weights: list[fx.Node]  # parameters and buffers
    inputs: list[fx.Node]  # batch tensors and activations
    outputs: list[fx.Node]
    updates: dict[fx.Node, fx.Node]  # buffer -> its new value
    updated: tuple[str, ...]  # the names of these buffers
    steady: frozenset[str]  # of these, those that are the same for any batch
    source: str
    first_dropout: int  # number of its first dropout in the model; its graph counts from 0
    piece: Piece | None = None  # of a divided region
    graph: fx.GraphModule = field(init=False)

    @property
    def arguments(self) -> list[fx.Node]:
        return [*self.weights, *self.inputs]

    @property
    def results(self) -> list[fx.Node]:
        return [*self.outputs, *self.updates.values()]


def cut(traced: Traced) -> list[Chunk]:
    """The regions in program order.

    Views are recomputed where they are used, so that only their base is sent. Operations that
    depend on no parameter (masks, positions) are recomputed too.
    """
    modes = modes_of(traced.root.graph)
    position = {node: index for index, node in enumerate(traced.root.graph.nodes)}
    runs, movable = runs_of(traced, list(modes))
    named = traced.weights
    weights = set(named.values())
    buffers = [named[name] for name in traced.updated]
    updates = dict(zip(traced.results[1:], buffers, strict=True))
    names = dict(zip(buffers, traced.updated, strict=True))
    wanted = set(traced.results)
    chunks = []
    for run in reversed(runs):  # backwards, so that all later uses of a value are known
        results = [node for node in run.nodes if node in wanted]
        if not results:
            continue
        body = sorted(_needed(results, set(run.nodes), movable), key=position.__getitem__)
        inside = set(body)
        arguments = list(
            dict.fromkeys(
                need for node in body for need in node.all_input_nodes if need not in inside
            )
        )
        wanted.update(arguments)
        written = {updates[node]: node for node in results if node in updates}
        chunk = Chunk(
            path=run.path,
            body=body,
            weights=list(dict.fromkeys([*(a for a in arguments if a in weights), *written])),
            inputs=[argument for argument in arguments if argument not in weights],
            outputs=[node for node in results if node not in updates],
            updates=written,
            updated=tuple(names[buffer] for buffer in written),
            steady=frozenset(traced.steady),
            source=_source(run),
            piece=run.piece,
            first_dropout=min(
                (node.args[2] for node in body if node.target in RANDOM_OPERATORS), default=0
            ),
        )
        chunk.graph = _graph(traced, chunk, modes)
        chunks.append(chunk)
    return chunks[::-1]


def _source(run: Run) -> str:
    """The first line of the region. Unmarked operations that joined it count only if alone."""
    if run.piece and run.piece.note:
        return run.piece.note
    marked = [node for node in run.nodes if path_of(node)] or run.nodes
    return next((line(node) for node in marked if line(node)), "")


def runs_of(traced: Traced, nodes: list[fx.Node]) -> tuple[list[Run], set[fx.Node]]:
    """The runs, and the operations that are recomputed where they are used instead of sent."""
    named = traced.weights
    parameters = {named[name] for name in traced.parameters}
    fixed = parameters | {traced.random} if traced.random else parameters
    free = _free(nodes, fixed, pinned=set())
    runs = find_runs(nodes, free, parameters)
    # A region that the user marked stays a region, even if all of it could run anywhere.
    marked = [run for run in runs if run.path and not run.piece]
    pinned = {node for run in marked if free.issuperset(run.nodes) for node in run.nodes}
    free = _free(nodes, fixed, pinned)
    movable = free | {node for node in nodes if _is_view(node) or is_symbolic(node)}
    return runs, movable - _converted(runs)


def _converted(runs: list[Run]) -> set[fx.Node]:
    """What conversions read and write. A message is exactly that, and not what it is a view of."""
    found = [node for run in runs if run.piece and run.piece.conversion for node in run.nodes]
    return {need for node in found for need in (node, *node.all_input_nodes)}


def _free(nodes: list[fx.Node], fixed: set[fx.Node], pinned: set[fx.Node]) -> set[fx.Node]:
    """Operations that need no activation and nothing `fixed`: masks, positions, rotary tables."""
    free: set[fx.Node] = set()
    for node in nodes:
        available = all(
            need in free or (need.op == "placeholder" and need not in fixed)
            for need in node.all_input_nodes
        )
        if available and node not in pinned and not is_mutable(node):
            free.add(node)
    return free


def _is_view(node: fx.Node) -> bool:
    """Whether all of a node's memory is that of its arguments.

    Above autograd, whether an operation such as `reshape` is a view depends on the layout. The
    traced values show it.
    """
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    own = storages(node)
    given = {storage for argument in node.all_input_nodes for storage in storages(argument)}
    return bool(own) and own <= given and not is_mutable(node)


def _needed(results: list[fx.Node], own: set[fx.Node], movable: set[fx.Node]) -> set[fx.Node]:
    """The operations behind `results`: the region's own, and movable ones from elsewhere."""
    needed: set[fx.Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in needed and (node in own or node in movable):
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _graph(traced: Traced, chunk: Chunk, modes: dict[fx.Node, Mode]) -> fx.GraphModule:
    """The region's graph on contiguous inputs, restored to their traced layout if that matters."""
    odd = [node for node in chunk.arguments if order_of(value(node)) is not None]
    made = _built(traced, chunk, modes, [])
    if odd:
        with traced.mode:
            given = [_contiguous(value(argument)) for argument in chunk.arguments]
            if not layouts.holds(made, given, [value(argument) for argument in chunk.arguments]):
                return _built(traced, chunk, modes, odd)
    return made


def _built(
    traced: Traced, chunk: Chunk, modes: dict[fx.Node, Mode], odd: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    with traced.mode:
        for argument in chunk.arguments:
            copies[argument] = graph.placeholder(argument.name)
            copies[argument].meta["val"] = _contiguous(value(argument))
        for argument in odd:
            copies[argument] = layouts.restored(graph, copies[argument], value(argument))
        switch = Switch(graph)
        for node in chunk.body:
            switch.to(modes[node])
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target in RANDOM_OPERATORS:
                x, random, number, *rest = copies[node].args
                copies[node].args = (x, random, number - chunk.first_dropout, *rest)
        switch.to(Mode())
        results = [_made_contiguous(graph, copies[node]) for node in chunk.results]
    graph.output(tuple(results))
    graph.lint()
    return graph_module(traced.root, graph)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _made_contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if is_contiguous(value(node)):
        return node
    return insert(graph, node, aten.clone.default, node, memory_format=torch.contiguous_format)
