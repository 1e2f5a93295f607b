"""Graphs as JSON, with operators by name: another process rebuilds them without pickle."""

import base64
import json
import math
import re
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture import refusals
from piper.capture.fx_nodes import line, value
from piper.capture.kernels.allowed_calls import function, identifier, name_of, target_of
from piper.capture.torch_private import graph_module, new_fake_mode, pytree, unknown_size
from piper.errors import CaptureError

_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_PRODUCT = re.compile(r"\w+(\*\w+)*")  # of sizes: u0, 6*u0
_PLAIN = (bool, int, float, str, type(None))


def to_json(module: fx.GraphModule, described: bool = False) -> str:
    """The graph as text. If `described`, with the types of its arguments, for Inductor."""
    return json.dumps(graph_rows(module, described))


def from_json(text: str) -> fx.GraphModule:
    """The graph from its text, for the devices of this process. Runs nothing that the text says."""
    try:
        return graph_from(json.loads(text))
    except CaptureError:
        raise
    except Exception as error:
        raise refusals.damaged_graph(f"{type(error).__name__}: {error}") from error


def graph_rows(module: fx.GraphModule, described: bool = False) -> dict[str, Any]:
    """The graph as plain values."""
    numbers: dict[fx.Node, int] = {}
    inside: dict[str, Any] = {}
    rows = []
    for number, node in enumerate(module.graph.nodes):
        numbers[node] = number
        encode = partial(_encoded, numbers)
        if node.op == "get_attr":
            inside[node.target] = _attribute(getattr(module, node.target), described)
        known = _name(node, inside)
        row = [node.op, node.name, known, encode(list(node.args)), encode(dict(node.kwargs))]
        if described and node.op == "placeholder" and value(node) is not None:
            row.append(_described(value(node)))
        rows.append(row)
    return {"nodes": rows, "inside": inside}


def graph_from(found: dict[str, Any], fakes: "_Fakes | None" = None) -> fx.GraphModule:
    """The graph from plain values."""
    fakes = fakes or _Fakes()
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    inside = {identifier(name): one for name, one in found["inside"].items()}
    for op, name, target, args, kwargs, *described in found["nodes"]:
        decode = partial(_decoded, nodes)
        known = function(target) if op == "call_function" else target_of(op, target, inside)
        options = {identifier(key): one for key, one in decode(kwargs).items()}
        node = graph.create_node(op, known, tuple(decode(args)), options, identifier(name))
        if described:
            node.meta["val"] = fakes.like(described[0])
        nodes.append(node)
    attributes = {
        n: graph_from(a, fakes) if "nodes" in a else _tensor(*a) for n, a in inside.items()
    }
    return graph_module(attributes, graph)


def is_described(module: fx.GraphModule) -> bool:
    """Whether it can be compiled. A graph without arguments is not worth it."""
    return any("val" in node.meta for node in module.graph.find_nodes(op="placeholder"))


def can_be_described(module: fx.GraphModule) -> bool:
    """Not if a size of an argument is computed from other unknown sizes."""
    vals = [value(node) for node in module.graph.find_nodes(op="placeholder")]
    sizes = [size for t in pytree.tree_leaves(vals) for size in (*t.shape, *t.stride())]
    return all(_PRODUCT.fullmatch(str(size)) for size in sizes)


def _name(node: fx.Node, inside: Collection[str]) -> str:
    if node.op == "call_function":
        return name_of(node.target, line(node))
    return target_of(node.op, node.target, inside)


def _encoded(numbers: dict[fx.Node, int], given: Any) -> Any:
    """Lists and plain values as they are; anything else as {kind: value}."""
    encode = partial(_encoded, numbers)
    match given:
        case fx.Node():
            return {"node": numbers[given]}
        case list():
            return [encode(item) for item in given]
        case tuple():
            return {"tuple": [encode(item) for item in given]}
        case dict():
            return {"dict": {key: encode(item) for key, item in given.items()}}
        case slice():
            return {"slice": [encode(end) for end in (given.start, given.stop, given.step)]}
        case complex():
            return {"complex": [given.real, given.imag]}
        case torch.device():
            return {"device": given.type}  # the index differs by process
        case torch.dtype() | torch.layout() | torch.memory_format():
            kind = next(name for name, kind in _KINDS.items() if isinstance(given, kind))
            return {kind: str(given).removeprefix("torch.")}
    if type(given) not in _PLAIN:
        raise refusals.cannot_be_sent(f"{type(given).__name__} {given}")
    return given


def _decoded(nodes: list[fx.Node], given: Any) -> Any:
    decode = partial(_decoded, nodes)
    if isinstance(given, list):
        return [decode(item) for item in given]
    if not isinstance(given, dict):
        return given
    ((kind, what),) = given.items()
    match kind:
        case "node":
            return nodes[what]
        case "tuple":
            return tuple(decode(item) for item in what)
        case "dict":
            return {key: decode(item) for key, item in what.items()}
        case "slice":
            return slice(*map(decode, what))
        case "complex":
            return complex(*what)
        case "device":
            return torch.device(what)
    return _of_kind(kind, what)


def _of_kind(kind: str, name: str) -> Any:
    """
    >>> _of_kind("dtype", "float32")
    torch.float32
    """
    found = getattr(torch, name, None)
    if kind not in _KINDS or not isinstance(found, _KINDS[kind]):
        raise refusals.cannot_be_sent(f"{kind} {name}")
    return found


def _attribute(found: Any, described: bool) -> Any:
    """A nested graph, or a constant: its shape, dtype, device and bytes."""
    if isinstance(found, fx.GraphModule):
        return graph_rows(found, described)
    if not isinstance(found, Tensor):
        raise refusals.cannot_be_sent(type(found).__name__)
    flat = found.detach().cpu().contiguous().flatten().view(torch.uint8)
    content = base64.b64encode(bytes(flat.tolist())).decode()
    return [
        list(found.shape),
        list(found.stride()),
        name_of_dtype(found.dtype),
        found.device.type,
        content,
    ]


def _tensor(shape: list[int], stride: list[int], dtype: str, device: str, content: str) -> Tensor:
    """The tensor with its original strides, which an operator may depend on."""
    raw = bytearray(base64.b64decode(content))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    found = flat.view(dtype_named(dtype)).view(shape)
    if list(found.stride()) != stride:
        found = torch.empty_strided(shape, stride, dtype=found.dtype).copy_(found)
    return found.to(device)


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    found: torch.dtype = _of_kind("dtype", name)
    return found


def _described(val: Any) -> Any:
    """The description of an argument. A bundle of tensors is a list."""
    if isinstance(val, tuple):
        return {"bundle": [_described(item) for item in val]}
    shape, stride = (list(map(str, sizes)) for sizes in (val.shape, val.stride()))
    return [shape, stride, name_of_dtype(val.dtype), val.device.type]


class _Fakes:
    """Fake tensors for all arguments of a graph. Equal unknown sizes stay equal."""

    def __init__(self) -> None:
        self.mode = new_fake_mode()
        self.symbols: dict[str, Any] = {}

    def like(self, described: Any) -> Any:
        if isinstance(described, dict):
            return tuple(map(self.like, described["bundle"]))
        shape, stride, dtype, device = described
        sizes = [list(map(self.size, row)) for row in (shape, stride)]
        with self.mode:
            return torch.empty_strided(*sizes, dtype=dtype_named(dtype), device=device)

    def size(self, text: str) -> Any:
        """A number, an unknown size, or a product of these."""
        return math.prod(int(x) if x.isdigit() else self.symbol(x) for x in text.split("*"))

    def symbol(self, name: str) -> Any:
        if name not in self.symbols:
            self.symbols[name] = unknown_size(self.mode)
        return self.symbols[name]
