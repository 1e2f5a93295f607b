"""In how many blocks a dimension may be cut: fused projections, flattened batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import fx

from piper.capture.graphs.division.calls import Call, Shape, packet, shape, tensors
from piper.ir.placement.placements import Cut

aten = torch.ops.aten
SPLITS = (aten.split, aten.chunk, aten.split_with_sizes)
VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten)
PRODUCTS = (aten.linear, aten.mm, aten.matmul)
PASSED = (aten.add, aten._to_copy, aten.to, aten.clone, *VIEWS)  # between a product and its split


@dataclass
class Blocks:
    """Numbers of blocks that some operator gives a meaning to, and the values that have them."""

    rows: set[int] = field(default_factory=set)  # of the first dimension of activations
    fused: dict[fx.Node, set[int]] = field(default_factory=dict)  # of others

    @property
    def every(self) -> tuple[int, ...]:
        return tuple(sorted({1}.union(self.rows, *self.fused.values())))

    def useful(self, node: fx.Node, cut: Cut) -> bool:
        """Whether an activation may be cut so. Fewer choices make the search faster."""
        return cut.blocks == 1 or cut.blocks in (self.fused.get(node, ()) if cut.dim else self.rows)


def block_counts(nodes: list[fx.Node]) -> Blocks:
    blocks = Blocks()
    for node in nodes:
        given = node.all_input_nodes[0] if node.all_input_nodes else node
        if packet(node) in VIEWS:
            blocks.rows |= _flattened(shape(given), shape(node))
        passed = _projection(given)
        counts = _fused(node, shape(given)) if passed else set()
        for one in (node, *passed) if counts else ():
            blocks.fused.setdefault(one, set()).update(counts)
    return blocks


def _flattened(old: Shape, new: Shape) -> set[int]:
    """A batch that is flattened with what follows it."""
    merged = len(old) > 1 and new and new[0] == old[0] * old[1] and old[1] > 1
    return {old[0]} if merged else set()


def _projection(node: fx.Node) -> list[fx.Node]:
    """The way back from a value to the product that it comes from, with features as they were."""
    found, last = [node], shape(node)[-1:]
    while packet(found[-1]) in PASSED and shape(found[-1])[-1:] == last:
        found.append(found[-1].all_input_nodes[0])
    return found if packet(found[-1]) in PRODUCTS and shape(found[-1])[-1:] == last else []


def _fused(node: fx.Node, given: Shape) -> set[int]:
    """q, k and v, or gate and up, from one product."""
    call: Any = Call(node, 1)
    if packet(node) in VIEWS:
        return _unfused(given, shape(node))
    if packet(node) not in (*SPLITS, aten.slice):
        return set()
    dim = call.dim()
    if dim != len(given) - 1:
        return set()
    sizes = [tensor.shape[dim] for tensor in tensors(node)]
    start = call.argument("start") or 0 if packet(node) is aten.slice else 0
    block = gcd(given[dim], start, *sizes)
    return {given[dim] // block} if block and start >= 0 else set()


def _unfused(old: Shape, new: Shape) -> set[int]:
    """The last dimension becomes (3, heads, size)."""
    fused = len(new) == len(old) + 2 and old[:-1] == new[: len(old) - 1]
    return {new[len(old) - 1]} if fused else set()
