"""What a compiler would fuse: operators without arithmetic, between matrix products.

A group of such operators reads each tensor from outside once, and writes what others read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from piper.capture.fx_nodes import storages

Group = list[fx.Node]


def fused(kernels: Sequence[fx.Node], products: set[fx.Node]) -> list[Group]:
    """Kernels in groups. Products stay alone.

    Connected kernels with the same number of products before them become one group: no product
    lies between them, so a group never waits for itself.
    """
    makers: dict[int, fx.Node] = {}
    levels: dict[fx.Node, int] = {}
    leader: dict[fx.Node, fx.Node] = {}

    def first(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = node = leader[leader[node]]
        return node

    for node in kernels:
        before = [makers[s] for s in read_by(node) if s in makers]
        levels[node] = max((levels[one] + (one in products) for one in before), default=0)
        leader[node] = node
        for one in before:
            if not {node, one} & products and levels[one] == levels[node]:
                leader[first(one)] = first(node)
        makers.update(dict.fromkeys(storages(node), node))
    groups: dict[fx.Node, Group] = {}
    for node in kernels:
        groups.setdefault(first(node), []).append(node)
    return list(groups.values())


def read_by(node: fx.Node) -> list[int]:
    """The storages that a node reads, in order."""
    inputs = (one for one in node.all_input_nodes if "val" in one.meta)
    return list(dict.fromkeys(storage for one in inputs for storage in storages(one)))


def read_elsewhere(groups: Iterable[Group], results: Iterable[fx.Node]) -> list[set[int]]:
    """The storages of each group that other groups read, or that the graph returns."""
    groups = list(groups)
    readers: dict[int, set[int]] = {}
    for number, group in enumerate(groups):
        for node in group:
            for storage in read_by(node):
                readers.setdefault(storage, set()).add(number)
    returned = {s for node in results if "val" in node.meta for s in storages(node)}
    made = [{s for node in group for s in storages(node)} for group in groups]
    return [
        {s for s in own if s in returned or readers.get(s, set()) - {number}}
        for number, own in enumerate(made)
    ]
