"""Experts in a divided stage: each device takes an equal part of the rows.

The rows of a team's batch are sorted by expert, and all its devices have them. Each takes as many
as any other, one part after the other, and counts how many of them are for each expert. From there
on they are rows as those of any replica: `Shard` of experts moves them to their experts and back.
Gradients of the experts' parameters are parts of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import line, value
from piper.capture.graphs.division import refusals
from piper.capture.graphs.division.calls import Emitter, Option, operands
from piper.ir.placement.division import DivisionRequest
from piper.ir.placement.placements import Cut, Invariant, Placement, Replicated

aten = torch.ops.aten
ROWS = Cut(0)


class Space(Protocol):
    """What must be known of a graph whose nodes get placements."""

    free: set[fx.Node]
    parameters: dict[fx.Node, str]

    def is_expert(self, node: fx.Node) -> bool: ...


def refuse_rows(wanted: Mapping[fx.Node, DivisionRequest]) -> None:
    """Rows must divide evenly, and what is before and behind experts must be divided, too."""
    for node, request in wanted.items():
        if request.what != "experts":
            continue
        for need in node.all_input_nodes:
            if need.op != "placeholder" and need not in wanted:
                raise refusals.experts_beside_whole_regions(line(node))
            if is_rows(need, wanted) and value(need).shape[0] % request.ways:
                raise refusals.uneven_rows(line(node), value(need).shape[0], request.ways)
        if any(user.op == "call_function" and user not in wanted for user in node.users):
            raise refusals.experts_beside_whole_regions(line(node))


def is_rows(need: fx.Node, wanted: Mapping[fx.Node, DivisionRequest]) -> bool:
    """Whether experts read it from outside, and it is not their counts."""
    outside = need in wanted and wanted[need].what != "experts"
    return outside and not is_counts(value(need))


def is_counts(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def option(space: Space, node: fx.Node) -> Option:
    """Rows from outside are cut; inside, everything is a device's own."""
    return Option(tuple(_read(space, need) for need in operands(node)), ROWS)


def _read(space: Space, need: fx.Node) -> Placement:
    if need in space.parameters:
        return Replicated()
    outside = not space.is_expert(need)
    return Invariant() if outside and (need in space.free or is_counts(value(need))) else ROWS


def counts_of(space: Space, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The counts that nodes of experts read from outside."""
    return (need for need in _outside(space, nodes) if is_counts(value(need)))


def rows_of(space: Space, nodes: Iterable[fx.Node]) -> int:
    """How many rows a team has."""
    found = (need for need in _outside(space, nodes) if not is_counts(value(need)))
    return next((int(value(need).shape[0]) for need in found), 0)


def _outside(space: Space, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in filter(space.is_expert, nodes):
        for need in operands(node):
            known = need in space.parameters or need in space.free or space.is_expert(need)
            if not known:
                yield need


def own_counts(emit: Emitter, counts: fx.Node, rows: int) -> fx.Node:
    """How many of `rows` rows, those behind the rows of earlier devices, each expert has."""
    ends = emit(aten.cumsum.default, counts, 0, dtype=value(counts).dtype)
    first = emit(aten.mul.Tensor, emit.rank, rows)
    last = emit(aten.sub.Tensor, ends, first)
    start = emit(aten.sub.Tensor, last, counts)
    own = (emit(aten.clamp.default, end, 0, rows) for end in (last, start))
    return emit(aten.sub.Tensor, *own)
