"""The joint graph of a region: its forward and its derivative in one graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture import refusals, torch_private
from piper.capture.fx_nodes import line, storages, value
from piper.capture.graphs.backward_state import settled
from piper.capture.regions.cut import Chunk
from piper.capture.tracing_private import (
    enable_python_dispatcher,
    trace_functional_joint,
    trace_joint,
)

aten = torch.ops.aten
_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass
class Joint:
    """(arguments, tangents) -> (results, gradients), with one gradient per argument."""

    module: fx.GraphModule
    arguments: list[fx.Node]
    tangents: list[fx.Node]
    results: list[fx.Node]
    gradients: list[fx.Node | None]  # None for an argument without one
    was_read: bool = False  # from the cache
    entry: str | None = None  # its key there


def differentiable(chunk: Chunk, mode: Any, wants: Sequence[bool]) -> tuple[bool, ...]:
    """Which results depend on arguments that require a gradient. The trace does not show it."""
    # torch 2.11 has no other matmul for sizes that are not known.
    with torch_private.fresh_symbols_ignored(mode), enable_python_dispatcher(), torch.enable_grad():
        # without hooks on all modules: they are the user's, and this is no module of his
        results = torch_private.function_of(chunk.graph)(*_arguments(chunk, wants))
    return tuple(result.requires_grad for result in results)


def differentiate(
    chunk: Chunk,
    mode: Any,
    wants: Sequence[bool],
    given: Sequence[bool],
    arguments: Sequence[Tensor] | None = None,
) -> Joint:
    """Trace the region with its derivative.

    `wants`: whether each argument requires a gradient. `given`: whether each result gets one.
    `arguments` replace those of the trace.
    """
    given_arguments = _arguments(chunk, wants, arguments)
    shared = _share_memory(chunk.graph.graph.output_node().args[0])

    def forward(*arguments: Tensor, run: type[fx.Interpreter] = fx.Interpreter) -> tuple:
        results = run(chunk.graph).run(*arguments)  # keeps the marks on nodes
        return tuple(map(_result, results, given, shared))

    def made() -> fx.GraphModule:
        traced = None if arguments else _functional(chunk, forward, given_arguments, given)
        if traced is not None:
            return traced
        try:
            return trace_joint(forward, given_arguments, backward=any(given))
        except AssertionError:  # a derivative writes beside a constant, as that of lerp does
            lifted = partial(forward, run=_Lifting)
            return trace_joint(lifted, given_arguments, backward=any(given))

    with mode:
        module = settled(chunk.graph.graph, made)
        _correct_types(module.graph)
    if torch_private.has_effects(module.graph):
        raise refusals.checked_values(line(next(iter(chunk.graph.graph.find_nodes(op="output")))))
    _fold_numbers(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    outputs = list(module.graph.output_node().args[0])
    own, tangents = placeholders[: len(wants)], placeholders[len(wants) :]
    return Joint(
        module=module,
        arguments=own,
        tangents=tangents,
        results=outputs[: len(given)],
        gradients=_aligned(outputs[len(given) :], wants),
    )


class _Lifting(fx.Interpreter):
    """Makes the constants of a graph tensors of the trace."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return torch.ops.aten.lift_fresh_copy(found) if isinstance(found, Tensor) else found


def _functional(
    chunk: Chunk, forward: Callable, arguments: Sequence[Tensor], given: Sequence[bool]
) -> fx.GraphModule | None:
    """The joint graph of a region that only computes, and whose results have their own memory."""
    if not torch_private.is_functional(chunk.graph.graph):
        return None
    results = map(value, chunk.graph.graph.output_node().args[0])
    tangents = [torch.empty_like(one) for one, wants in zip(results, given, strict=True) if wants]
    module = trace_functional_joint(forward, arguments, tangents)
    if module is None or _shares_memory(module.graph, len(arguments), len(given)):
        return None
    return module


def _shares_memory(graph: fx.Graph, arguments: int, results: int) -> bool:
    """Whether a result is a view of an argument or of another result."""
    own = graph.find_nodes(op="placeholder")[:arguments]
    made = list(graph.output_node().args[0])[:results]
    memories = [memory for node in made for memory in storages(node)]
    before = {memory for node in own for memory in storages(node)}
    return len(set(memories)) < len(made) or not before.isdisjoint(memories)


def _arguments(
    chunk: Chunk, wants: Sequence[bool], others: Sequence[Tensor] | None = None
) -> list[Tensor]:
    found = others or [value(node) for node in chunk.graph.graph.find_nodes(op="placeholder")]
    return [tensor.detach().requires_grad_(want) for tensor, want in zip(found, wants, strict=True)]


def _share_memory(results: Any) -> list[bool]:
    """Whether each result is a view of another one, of the same tensor, or of an argument."""
    bases = [_base(node) for node in results]
    return [bases.count(base) > 1 or _is_argument(base) for base in bases]


def _is_argument(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _base(node: Any) -> Any:
    while isinstance(node, fx.Node) and torch_private.is_view(node):
        node = node.args[0]
    return node


def _result(result: Tensor, given: bool, shared: bool) -> Tensor:
    # Autograd treats a view as its base plus a recipe. Callers do not need that. What is detached
    # twice is no view for autograd, and yet shares memory.
    if (torch_private.is_view_tensor(result) and given) or shared:
        result = aten._unsafe_view.default(result, result.shape)
    return result if given else result.detach()


def _aligned(gradients: list, wants: Sequence[bool]) -> list[fx.Node | None]:
    """One gradient per argument: torch leaves out arguments that require none."""
    if len(gradients) == len(wants):
        return gradients
    rest = iter(gradients)
    return [next(rest, None) if want else None for want in wants]


def _fold_numbers(module: fx.GraphModule) -> None:
    """Write numbers that are already known into the graph as constants."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and isinstance(value(node), int | float | None):
            _replace(node, value(node))
    module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _replace(node: fx.Node, number: Any) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: number if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: number if n is node else n)


def _correct_types(graph: fx.Graph) -> None:
    """torch 2.11 says that attention on a CPU keeps float32 for its backward, also in float64."""
    for node in graph.find_nodes(op="call_function", target=_CPU_ATTENTION):
        mixed, kept = node.meta["val"]
        if mixed.dtype == torch.float64 != kept.dtype:
            node.meta["val"] = mixed, kept.double()
            for user in node.users:
                if user.args[1] == 1:
                    _set_type(user, torch.float64)


def _set_type(node: fx.Node, dtype: torch.dtype) -> None:
    node.meta["val"] = node.meta["val"].to(dtype)
    for user in node.users:
        if user.target is aten.detach.default:
            _set_type(user, dtype)
