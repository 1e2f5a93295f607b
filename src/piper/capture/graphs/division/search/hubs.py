"""Values that many layers read, such as what an encoder gives to each layer of a decoder.

While such a value is alive, a graph cannot be cut between two layers, and the search takes very
long. So it gets one placement from where it is made, and each reader converts that one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from operator import getitem

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import operands, shape
from piper.capture.kernels.ring import BLOCK, PASSING, SUM

APART = 24  # nodes between two reads: a residual is read again sooner, or by another operator
MOST = 6  # groups, those that live longest: each takes a few searches
STEPS = (BLOCK, PASSING, SUM, getitem)  # of a ring, which is one attention however long it is

Hubs = tuple[fx.Node, ...]


def hubs_of(nodes: Sequence[fx.Node]) -> tuple[Hubs, ...]:
    """Tensors that equal operators of several layers read, in the order of the graph.

    Equal ones, one after the other, are in equal layers: they come as one group, and get one
    placement.
    """
    before = accumulate((node.target not in STEPS for node in nodes), initial=0)
    number = dict(zip(nodes, before, strict=False))
    tensors = (node for node in nodes if not isinstance(value(node), list | tuple))
    lives = {node: _life(node, number) for node in tensors}
    groups = _alike([node for node in lives if lives[node]], number, lives)
    longest = sorted(groups, key=lambda group: -lives[group[0]])[:MOST]
    return tuple(sorted(longest, key=lambda group: number[group[0]]))


def _alike(
    hubs: Sequence[fx.Node], number: dict[fx.Node, int], lives: dict[fx.Node, int]
) -> list[Hubs]:
    """Hubs that are made and read alike, and of which each is dead before the next is made."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for hub in hubs:
        readers = tuple((user.target, number[user] - number[hub]) for user in _readers(hub, number))
        group = groups.setdefault((_made(hub), readers), [])
        apart = not group or number[group[-1]] + lives[group[-1]] < number[hub]
        (group if apart else groups.setdefault(hub, [])).append(hub)
    return [tuple(group) for group in groups.values()]


def _made(node: fx.Node, depth: int = 3) -> Hashable:
    """By which operators, and of which sizes."""
    if node.op != "call_function" or not depth:
        return shape(node) if isinstance(value(node), torch.Tensor) else None
    return node.target, shape(node), *(_made(operand, depth - 1) for operand in operands(node))


def _readers(node: fx.Node, number: dict[fx.Node, int]) -> Iterator[fx.Node]:
    return filter(number.__contains__, node.users)


def _life(node: fx.Node, number: dict[fx.Node, int]) -> int:
    """How long such a value is alive; 0 for any other."""
    reads: dict[tuple[object, ...], list[int]] = {}
    for user in _readers(node, number):
        given = operands(user)
        place = user.target, given.index(node), *map(shape, given)  # two products are not equal
        reads.setdefault(place, []).append(number[user])
    apart = any(max(places) - min(places) > APART for places in reads.values())
    return max(max(places) for places in reads.values()) - number[node] if apart else 0
