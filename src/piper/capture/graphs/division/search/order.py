"""An order in which few values are alive at a time: the search takes time for each of them."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def depth_first(nodes: list[fx.Node], hubs: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The same nodes, each behind its arguments.

    Next comes the node that adds fewest values to those that are alive; of equal ones, the one
    that reads the newest value. Hubs do not count: if they did, all layers of a decoder would take
    their keys from the encoder at once. Equal layers get equal orders.
    """
    inside = set(nodes)
    missing = {node: len(inside.intersection(node.all_input_nodes)) for node in nodes}
    unread = {node: len(inside.intersection(node.users)) for node in nodes}
    written: dict[fx.Node, int] = {}
    position = {node: k for k, node in enumerate(nodes)}
    ready = [node for node in nodes if not missing[node]]

    def price(node: fx.Node) -> tuple[int, int, int]:
        needs = [need for need in node.all_input_nodes if need in inside and need not in hubs]
        written_here = unread[node] > 0 and node not in hubs
        added = written_here - sum(unread[need] == 1 for need in needs)
        return added, -max((written[need] for need in needs), default=-1), position[node]

    while ready:
        node = min(ready, key=price)
        ready.remove(node)
        written[node] = len(written)
        for need in inside.intersection(node.all_input_nodes):
            unread[need] -= 1
        for user in inside.intersection(node.users):
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return list(written)
