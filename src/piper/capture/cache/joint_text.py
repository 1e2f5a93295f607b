"""A joint graph as text, with the values of its nodes, and back. Reading it runs no code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.cache.torch_private import fake_like
from piper.capture.fx_nodes import value
from piper.capture.graphs.joint import Joint
from piper.capture.graphs.recomputation import checkpoint_of, mark_checkpoint
from piper.capture.kernels.shipping import dtype_named, graph_from, graph_rows, name_of_dtype
from piper.capture.torch_private import is_backward, mark_backward, storage_id

META = torch.device("meta")


class NotStorable(Exception):
    """A joint graph that cannot be written such that reading it gives the same."""


def to_text(joint: Joint) -> str:
    """The text of a joint graph, if it can be written."""
    nodes = list(joint.module.graph.nodes)
    position = {node: k for k, node in enumerate(nodes)}
    memory = _Writing()
    return json.dumps(
        {
            "graph": graph_rows(joint.module),
            "values": [memory.described(value(node)) for node in nodes],
            "backward": [k for node, k in position.items() if is_backward(node)],
            "checkpoints": [checkpoint_of(node) for node in nodes],
            "arguments": len(joint.arguments),
            "results": [position[node] for node in joint.results],
            "gradients": [None if n is None else position[n] for n in joint.gradients],
        }
    )


def from_text(text: str, mode: Any) -> Joint:
    """The same joint graph, whose values belong to this fake mode."""
    found = json.loads(text)
    module = graph_from(found["graph"])
    nodes = list(module.graph.nodes)
    memory = _Reading(mode)
    for node, described in zip(nodes, found["values"], strict=True):
        if described is not None:
            node.meta["val"] = memory.made(described)
    for k in found["backward"]:
        mark_backward(nodes[k])
    for node, checkpoint in zip(nodes, found["checkpoints"], strict=True):
        if checkpoint is not None:
            mark_checkpoint(node, checkpoint)
    placeholders = module.graph.find_nodes(op="placeholder")
    return Joint(
        module=module,
        arguments=placeholders[: found["arguments"]],
        tangents=placeholders[found["arguments"] :],
        results=[nodes[k] for k in found["results"]],
        gradients=[None if k is None else nodes[k] for k in found["gradients"]],
    )


@dataclass
class _Writing:
    """Numbers memory in the order of its first tensor, which fills it; the others are views."""

    first: dict[int, tuple[int, torch.dtype]] = field(default_factory=dict)

    def described(self, given: Any) -> Any:
        match given:
            case None:
                return None
            case Tensor():
                return self.of_tensor(given)
            case tuple() | list():
                return {type(given).__name__: [self.described(item) for item in given]}
        raise NotStorable(f"a value that is a {type(given).__name__}")

    def of_tensor(self, tensor: Tensor) -> list[Any]:
        sizes = *tensor.shape, *tensor.stride(), tensor.storage_offset()
        if any(type(size) is not int for size in sizes) or tensor.layout is not torch.strided:
            raise NotStorable("a size that is not known, or a sparse tensor")
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            raise NotStorable("a tensor with a view of its numbers")
        number = self.number(tensor)
        kind = name_of_dtype(tensor.dtype), tensor.device.type
        return [number, *kind, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]

    def number(self, tensor: Tensor) -> int:
        memory = storage_id(tensor)
        if memory not in self.first:
            if tensor.storage_offset() or tensor.untyped_storage().nbytes() != _bytes(tensor):
                raise NotStorable("a view of memory that no value fills")
            self.first[memory] = len(self.first), tensor.dtype
        number, dtype = self.first[memory]
        if dtype != tensor.dtype:
            raise NotStorable("one memory with two types")
        return number


@dataclass
class _Reading:
    mode: Any
    first: dict[int, Tensor] = field(default_factory=dict)  # without values, by number

    def made(self, described: Any) -> Any:
        match described:
            case None:
                return None
            case {"tuple": items}:
                return tuple(map(self.made, items))
            case {"list": items}:
                return list(map(self.made, items))
            case [int(number), str(dtype), str(device), shape, stride, offset]:
                if number not in self.first:
                    kind = dtype_named(dtype)
                    self.first[number] = torch.empty_strided(shape, stride, dtype=kind, device=META)
                view = self.first[number].as_strided(shape, stride, offset)
                return fake_like(self.mode, view, device)
        raise ValueError("not the description of a value")


def _bytes(tensor: Tensor) -> int:
    """The memory that a tensor of this layout needs."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def is_derivative_of(joint: Joint, graph: fx.GraphModule) -> bool:
    """Whether it has the arguments and results of the derivative of a graph."""
    results: Any = graph.graph.output_node().args[0]
    found = [
        gradient or own for gradient, own in zip(joint.gradients, joint.arguments, strict=True)
    ]
    wanted = graph.graph.find_nodes(op="placeholder")
    return (
        _kinds(joint.arguments) == _kinds(found) == _kinds(wanted)
        and _kinds(joint.results) == _kinds(results)
        and all(kind in _kinds(results) for kind in _kinds(joint.tangents))
    )


def _kinds(nodes: Sequence[fx.Node]) -> list[tuple[Any, ...]]:
    tensors = (value(node) for node in nodes)
    return [(tuple(one.shape), one.dtype, one.device.type) for one in tensors]
