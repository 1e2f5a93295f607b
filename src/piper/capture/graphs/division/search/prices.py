"""What a choice of placements is judged by, in bytes that a device sends."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from piper.capture.graphs.division.calls import operands, packet, shape
from piper.capture.graphs.division.rules.convolutions import DIMENSIONS, TRANSPOSED
from piper.capture.graphs.division.rules.einsum import letters
from piper.ir.placement.placements import LOCAL, Conversion, Placement, exists, sent

aten = torch.ops.aten
PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm)


@dataclass(frozen=True, slots=True)
class Prices:
    """Weights, not seconds: first of all, work and parameters are divided, as the user asked."""

    flop: float = 1.0
    written: float = 1.0  # a byte of a result, which is often kept for the backward, too
    whole: float = 10.0  # the same of one that is whole, where tokens are divided to save memory
    matrix: float = 1000.0  # a byte of a matrix that each device keeps whole
    summed: float = 0.2  # a byte of a gradient that is added up once a step
    message: float = 0.25  # for starting one, in bytes of a typical activation


def conversion_price(
    start: float, source: Placement, target: Placement, nbytes: int, ways: int
) -> float | None:
    """`start`: the price of starting a message. None: there is no such conversion."""
    if source == target:
        return 0.0
    if not exists(source, target):
        return None
    conversion = Conversion(source, target)
    steps = conversion.forward, conversion.backward
    volume = sum(sent(step, nbytes, ways) for step in steps)
    started = sum(start for step in steps if step not in LOCAL)
    return volume + started


def flops(node: fx.Node) -> float:
    """Of a whole product, convolution or attention."""
    if packet(node) in PRODUCTS:
        return 2.0 * prod(shape(node)) * shape(_read(node, 0))[-1]
    if packet(node) is aten.scaled_dot_product_attention:
        return 4.0 * prod(shape(node)) * shape(_read(node, 1))[-2]
    if packet(node) in DIMENSIONS:
        read, weight = (shape(_read(node, place)) for place in (0, 1))
        return 2.0 * prod(read if packet(node) in TRANSPOSED else shape(node)) * prod(weight[1:])
    if packet(node) is aten.einsum:
        return 2.0 * prod(_sizes(node).values())
    return 0.0


def _read(node: fx.Node, place: int) -> fx.Node:
    """An argument. Some may be the same node: attention of `h` to itself."""
    found = node.args[place] if place < len(node.args) else list(node.kwargs.values())[place]
    assert isinstance(found, fx.Node)
    return found


def _sizes(node: fx.Node) -> dict[str, int]:
    """The size of each letter of an `einsum`. Dimensions without one are left out."""
    given, _ = letters(str(node.args[0]))
    found: dict[str, int] = {}
    for names, one in zip(given, operands(node), strict=False):
        found.update(zip(names, shape(one), strict=False))
    return found
