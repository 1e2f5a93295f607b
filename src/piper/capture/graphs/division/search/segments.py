"""A graph as a chain of segments: between two of them, one value is alive.

Equal layers give equal segments. Each is solved once, for all placements at its two ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import operands, tensors
from piper.capture.graphs.division.search.conversions import Read
from piper.capture.graphs.division.search.frontier import Frontier
from piper.capture.graphs.division.search.space import Space
from piper.capture.graphs.division.search.steps import Choice
from piper.ir.placement.placements import Placement


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes between two values that everything passes through."""

    entry: fx.Node | None  # None: the first segment
    nodes: tuple[fx.Node, ...]
    key: int  # equal for segments with equal choices

    @property
    def exit(self) -> fx.Node:
        return self.nodes[-1]


@dataclass(frozen=True, slots=True)
class Solution:
    """What a segment costs, and the choices for its nodes in order."""

    segment: Segment  # the one that was solved
    cost: float
    choices: tuple[Choice, ...]
    entry: Placement | None = None  # of the value it begins with, if any
    end: Read | None = None  # the conversion of the exit, if any

    def of(self, other: Segment) -> Iterator[tuple[fx.Node, Choice]]:
        """The same choices for the nodes of an equal segment."""
        same = dict(zip(self.segment.nodes, other.nodes, strict=True))
        if self.segment.entry is not None and other.entry is not None:
            same[self.segment.entry] = other.entry
        for node, choice in zip(other.nodes, self.choices, strict=True):
            reads = tuple(read.of(same) for read in choice.reads)
            yield node, Choice(choice.option, reads)

    def conversion(self, other: Segment) -> Iterator[Read]:
        if self.end is not None:
            yield Read(other.exit, self.end.source, self.end.target)


Matrix = dict[Placement | None, dict[Placement, Solution]]  # placement of entry, of exit


def segments_of(space: Space, last: dict[fx.Node, fx.Node]) -> list[Segment]:
    """Cut behind each node that is the only one whose value is still needed."""
    number = {node: k for k, node in enumerate((*space.order, space.graph.output_node()))}
    found: list[Segment] = []
    keys: dict[Hashable, int] = {}  # long ones, which would be hashed again and again
    entry, start, needed = None, 0, -1
    for k, node in enumerate(space.order):
        until = number[last.get(node, node)]
        if needed <= k:
            nodes = tuple(space.order[start : k + 1])
            key = keys.setdefault(_key(space, entry, nodes), len(keys))
            found.append(Segment(entry, nodes, key))
            entry, start, needed = node, k + 1, until
        else:
            needed = max(needed, until)
    return found


def last_uses(space: Space, result: fx.Node) -> dict[fx.Node, fx.Node]:
    """The last node that reads a value. How a hub is placed is known without its being alive.

    Statistics of a batch norm beside what is divided are read by none.
    """
    last = {operand: node for node in space.order for operand in operands(node)}
    last[result] = result.graph.output_node()
    for node, following in pairwise(space.order):
        if node in space.hubs or node not in last:
            last[node] = following
    return last


def _key(space: Space, entry: fx.Node | None, nodes: tuple[fx.Node, ...]) -> Hashable:
    numbers: dict[fx.Node, Any] = {} if entry is None else {entry: -1}
    parameters: dict[fx.Node, int] = {}

    def name(node: fx.Node) -> str:
        if node in space.hubs and numbers.get(node, -1) < 0:  # made elsewhere
            return f"hub{node.name}{_types(node)}"
        if node in numbers:
            return f"%{numbers[node]}"
        if node in space.parameters:
            number = parameters.setdefault(node, len(parameters))
            shared = node.name if node in space.shared else ""
            return f"w{number}{_types(node)}{shared}"
        return f"free{_types(node)}"

    rows = []
    for number, node in enumerate(nodes):
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Name(name(n)))
        options = tuple(space.options[node])
        rows.append(
            (str(node.target), repr(arguments), _types(node), options, space.hubs.get(node))
        )
        numbers[node] = number
    first = "" if entry is None else name(entry) + _types(entry)
    return first, tuple(rows)


class _Name(str):
    """A string that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _types(node: fx.Node) -> str:
    if not isinstance(value(node), torch.Tensor | list | tuple):
        return "?"
    return str([(tuple(tensor.shape), tensor.dtype) for tensor in tensors(node)])


def solve(
    frontier: Frontier, segment: Segment, entry: Placement | None, widths: tuple[int, ...]
) -> dict[Placement, Solution]:
    """The cheapest way from a placement of the entry to each of the exit."""
    found: dict[Placement, Solution] = {}
    for cost, trail in frontier.run(entry, widths).values():
        assert trail is not None
        choices = trail.choices()
        end = frontier.moves.held.get(segment.exit, choices[-1].option.output)
        found[end] = Solution(segment, cost, tuple(choices), entry)
    return _with_conversions(frontier, segment, found)


def entries(frontier: Frontier, segment: Segment) -> list[Placement | None]:
    """Placements in which a segment may begin."""
    return [None] if segment.entry is None else [*_ends(frontier, segment.entry)]


def _ends(frontier: Frontier, node: fx.Node) -> list[Placement]:
    """Placements in which a value may be between two segments."""
    held = frontier.moves.held
    return [held[node]] if node in held else placements_of(frontier.moves.space, node)


def _with_conversions(
    frontier: Frontier, segment: Segment, found: dict[Placement, Solution]
) -> dict[Placement, Solution]:
    """The exit may be converted before anything reads it, so that all layers begin alike."""
    every = dict(found)
    for target in _ends(frontier, segment.exit):
        for source, solution in found.items():
            price = frontier.moves.conversions.price(segment.exit, source, target)
            if price is not None:
                cost = solution.cost + price
                if target not in every or cost < every[target].cost:
                    read = Read(segment.exit, source, target)
                    every[target] = replace(solution, cost=cost, end=read)
    return every


def placements_of(space: Space, node: fx.Node) -> list[Placement]:
    """How a value may be made, or be read."""
    made = [option.output for option in space.options[node]]
    read = [
        placement
        for user in node.users
        if user in space.options
        for option in space.options[user]
        for operand, placement in zip(operands(user), option.inputs, strict=True)
        if operand is node
    ]
    return list(dict.fromkeys([*made, *read]))
