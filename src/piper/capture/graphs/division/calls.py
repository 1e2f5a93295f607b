"""One call of an operator, as a rule sees it, and one way to divide it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import insert_with, value
from piper.capture.torch_private import OpOverload, argument_names
from piper.ir.placement.placements import Cut, Placement

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Option:
    """Placements of an operator's tensor arguments for which each device can run it by itself.

    Forward and backward are then right: the result, and the gradient of each argument, are as
    their placements say.
    """

    inputs: tuple[Placement, ...]  # of each tensor argument, as often as it is an argument
    output: Placement


@dataclass(frozen=True, slots=True)
class Call:
    """An operator on whole tensors, to be divided over `ways` devices."""

    node: fx.Node
    ways: int
    blocks: tuple[int, ...] = (1,)  # in how many blocks a dimension may be cut
    zigzag: bool = False  # whether all cuts are in zigzag order

    @property
    def packet(self) -> Any:
        return packet(self.node)

    @property
    def operands(self) -> list[fx.Node]:
        return operands(self.node)

    @property
    def shape(self) -> Shape:
        return shape(self.node)

    @property
    def shapes(self) -> list[Shape]:
        return [shape(node) for node in self.operands]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument of the operator by its name in the schema."""
        names = argument_names(self.node)
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        position = names.index(name) if name in names else len(self.node.args)
        return self.node.args[position] if position < len(self.node.args) else default

    def dim(self, default: int = 0, name: str = "dim") -> int:
        """A dimension of its first argument, from the front. A number has one, for torch."""
        return self.argument(name, default) % max(len(self.shapes[0]), 1)

    def dims(self, given: int | Sequence[int] | None) -> list[int]:
        """Dimensions of its first argument, from the front. None given: all."""
        size = len(self.shapes[0])
        if given is None or given == []:
            return list(range(size))
        return [dim % max(size, 1) for dim in ([given] if isinstance(given, int) else given)]

    def cuts(self, dims: Iterable[int]) -> Iterator[Cut]:
        return (Cut(dim, blocks) for dim in dims for blocks in self.blocks)


@dataclass(frozen=True, slots=True)
class Emitter:
    """Adds nodes to the graph that all devices run. Only `rank` differs from device to device."""

    graph: fx.Graph
    meta: Mapping[str, Any]  # marks and line of the new nodes
    rank: fx.Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_with(self.graph, self.meta, target, *args, **kwargs)


def packet(node: fx.Node) -> Any:
    """The operator without its overload: aten.add for aten.add.Tensor."""
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target


def operands(node: fx.Node) -> list[fx.Node]:
    """Its tensor arguments in order. A node that is two arguments is there twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def shape(node: fx.Node) -> Shape:
    """Of its result. Of several results, that of the first."""
    return tuple(tensors(node)[0].shape)


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """All results of a node."""
    found = value(node)
    return list(found) if isinstance(found, list | tuple) else [found]
