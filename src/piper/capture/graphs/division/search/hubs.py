"""Values that many layers read, such as what an encoder gives to each layer of a decoder.

While such a value is alive, a graph cannot be cut between two layers, and the search takes very
long. So it gets one placement from where it is made, and each reader converts that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import getitem

from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import operands, shape
from piper.capture.kernels.ring import BLOCK, PASSING, SUM

APART = 24  # nodes between two reads: a residual is read again sooner, or by another operator
MOST = 6  # those that live longest: each takes a few searches
STEPS = (BLOCK, PASSING, SUM, getitem)  # of a ring, which is one attention however long it is

Hubs = tuple[fx.Node, ...]


def hubs_of(nodes: Sequence[fx.Node]) -> Hubs:
    """Tensors that equal operators of several layers read, in the order of the graph."""
    before = accumulate((node.target not in STEPS for node in nodes), initial=0)
    number = dict(zip(nodes, before, strict=False))
    tensors = (node for node in nodes if not isinstance(value(node), list | tuple))
    lives = {node: _life(node, number) for node in tensors}
    longest = sorted(filter(lives.__getitem__, lives), key=lambda node: -lives[node])[:MOST]
    return tuple(sorted(longest, key=number.__getitem__))


def _life(node: fx.Node, number: dict[fx.Node, int]) -> int:
    """How long such a value is alive; 0 for any other."""
    reads: dict[tuple[object, ...], list[int]] = {}
    for user in filter(number.__contains__, node.users):
        given = operands(user)
        place = user.target, given.index(node), *map(shape, given)  # two products are not equal
        reads.setdefault(place, []).append(number[user])
    apart = any(max(places) - min(places) > APART for places in reads.values())
    return max(max(places) for places in reads.values()) - number[node] if apart else 0
