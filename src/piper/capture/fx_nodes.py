"""Queries on the nodes of a traced graph, how to add a node, and what a trace says of each."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from piper.capture.torch_private import (
    LINE,
    argument_defaults,
    argument_names,
    pytree,
    storage_id,
)

Strides = tuple[int, ...]
STRIDES = "piper_strides"  # in the meta of nodes of a graph without values


def value(node: fx.Node) -> Any:
    """The value of the node, as fake tensors and symbolic numbers."""
    return node.meta.get("val")


def line(node: fx.Node) -> str:
    """The line of the user's model that made the node, or else the first of its inputs with one."""
    while not node.meta.get(LINE) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.meta.get(LINE, "")


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, with those that have defaults."""
    names = argument_names(node)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    merged = argument_defaults(node) | given
    return {name: merged[name] for name in names if name in merged}


def strides_of(node: Any) -> Strides | None:
    """Of a tensor, as noted in a graph without values, or else as its value has them.

    None if they are not known, or only when the graph runs.
    """
    if not isinstance(node, fx.Node):
        return ()  # a number, or nothing
    if STRIDES in node.meta or "val" not in node.meta:
        return node.meta.get(STRIDES)
    found = value(node)
    if not isinstance(found, Tensor):
        return ()
    fixed = all(isinstance(size, int) for size in (*found.shape, *found.stride()))
    return found.stride() if fixed else None


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node is a number that is known only when the graph runs."""
    return isinstance(value(node), torch.SymInt | torch.SymFloat | torch.SymBool)


def number_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of a tensor that holds the value of a symbolic node."""
    match value(node):
        case torch.SymInt():
            return torch.int64
        case torch.SymFloat():
            return torch.float64
        case _:
            return torch.bool


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Those of its value. Most nodes have one, and pytree would be slower."""
    found = value(node)
    if isinstance(found, Tensor):
        return [found]
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def storages(node: fx.Node) -> set[int]:
    """Identifiers of the storages of a node's tensors. Views share them."""
    return set(map(storage_id, tensors_of(node)))


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Compare sizes as text, because comparing two unknown sizes is an error."""
    return (a.dtype, a.device, str(tuple(a.shape)), str(a.stride())) == (
        b.dtype,
        b.device,
        str(tuple(b.shape)),
        str(b.stride()),
    )


def is_contiguous(tensor: Tensor) -> bool:
    """Compare sizes as text, for the same reason."""
    step: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if str(size) != "1" and str(stride) != str(step):
            return False
        step = step * size
    return True


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost, or None if the tensor has gaps."""
    numbers = [*tensor.shape, *tensor.stride()]
    if not all(type(number) is int for number in numbers) or is_contiguous(tensor):
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d)))
    step = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != step:
            return None
        step *= tensor.shape[dim]
    return order


def insert(graph: fx.Graph, like: fx.Node, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the insertion point, with the marks and line of `like` and its own value."""
    return insert_with(graph, like.meta, target, *args, **kwargs)


def insert_with(
    graph: fx.Graph, meta: Mapping[str, Any], target: Callable, *args: Any, **kwargs: Any
) -> fx.Node:
    """A new node at the insertion point, with this metadata and its own value."""
    known_args, known_kwargs = fx.map_arg((args, kwargs), value)
    found = target(*known_args, **known_kwargs)  # it may fail, and leaves no node then
    node = graph.call_function(target, args, kwargs)
    node.meta = {**meta, "val": found}
    return node


def closure(roots: Iterable[fx.Node], stop: Container[fx.Node]) -> set[fx.Node]:
    """All nodes that `roots` need, up to those in `stop`."""
    needed: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in stop:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def in_order(graph: fx.Graph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted]


def paired(graph: fx.Graph, other: fx.Graph) -> dict[fx.Node, fx.Node] | None:
    """The nodes of two traces of one function, if they call the same operators."""
    here, there = list(graph.nodes), list(other.nodes)
    place = {node: k for k, node in enumerate(here)} | {node: k for k, node in enumerate(there)}

    def outline(node: fx.Node) -> tuple[object, ...]:
        return node.op, str(node.target), tuple(place[one] for one in node.all_input_nodes)

    if [outline(node) for node in here] != [outline(node) for node in there]:
        return None
    return dict(zip(here, there, strict=True))


@contextmanager
def values_described_once() -> Iterator[None]:
    """While this is open, nodes of traces have a `val`, and nothing else that says the same.

    torch would describe each tensor once more, in words for older code. It takes longer than `val`.
    """
    original = proxy_tensor.set_meta
    proxy_tensor.set_meta = _set_value
    try:
        yield
    finally:
        proxy_tensor.set_meta = original


def _set_value(proxy: fx.Proxy, found: Any) -> fx.Proxy:
    is_input = proxy.node.op == "placeholder"
    proxy.node.meta["val"] = proxy_tensor.extract_val(found, include_real=is_input)
    return proxy
