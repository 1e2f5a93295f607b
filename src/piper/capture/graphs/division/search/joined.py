"""Values that one operator joins, such as what a scan gives for each token.

All of them are alive until they are joined, and states could differ in each of them. So all of them
get the placement of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from piper.capture.graphs.division.calls import operands, tensors
from piper.ir.placement.division import DivisionRequest

FEW = 3  # which may each have a placement of their own


def joined(
    order: Sequence[fx.Node], requests: Mapping[fx.Node, DivisionRequest]
) -> dict[fx.Node, fx.Node]:
    """The first of the values that are joined, by each of the others."""
    number = {node: k for k, node in enumerate(order)}
    found: dict[fx.Node, fx.Node] = {}
    for node in order:
        mine = [one for one in dict.fromkeys(operands(node)) if one in number]
        only = [one for one in mine if len(one.users) == 1 and len(tensors(one)) == 1]
        for alike in _alike(only, requests):
            first, *others = sorted(alike, key=number.__getitem__)
            found.update(dict.fromkeys(others, first))
    return found


def _alike(
    nodes: Sequence[fx.Node], requests: Mapping[fx.Node, DivisionRequest]
) -> Iterator[list[fx.Node]]:
    """Values that may all have the same placements, if they are many."""
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in nodes:
        (tensor,) = tensors(node)
        key = node.target, *tensor.shape, tensor.dtype, id(requests.get(node))
        groups.setdefault(key, []).append(node)
    return (group for group in groups.values() if len(group) > FEW)
