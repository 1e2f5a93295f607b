"""Gathers with zero=3 that orders put before passes that come earlier than their use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.names import NodeId
from piper.passes.orders.resolved_orders import ResolvedSlot, Resolver

Early = dict[int, list[int]]  # a position in the order of a lane -> those of later uses


def early_gathers(dag: Dag, orders: dict[int, list[Compute]]) -> dict[int, Early]:
    """By lane and position: the later passes whose parameters are gathered before it."""
    found: dict[int, Early] = {lane: {} for lane in orders}
    if not dag.message_orders:
        return found
    resolver = Resolver(dag)
    resolved = [resolver.slots(order) for order in dag.message_orders]
    for lane, order in orders.items():
        before = positions(dag, order)
        for slots in resolved:
            for until, use in limits(slots, lane, before):
                if until < before[use]:
                    found[lane].setdefault(until, []).append(before[use])
    return found


def positions(dag: Dag, order: Sequence[Compute]) -> dict[NodeId, int]:
    """For each node of the sequence, how many passes of a lane come before it."""
    mine, found, count = {node.id for node in order}, dict[NodeId, int](), 0
    for name in dag.sequence:
        found[name] = count
        count += name in mine
    return found


def limits(
    slots: Sequence[ResolvedSlot], lane: int, before: dict[NodeId, int]
) -> Iterator[tuple[int, NodeId]]:
    """Each use whose gathers an order names, with the first position of the slot that follows."""
    waiting: list[NodeId] = []
    for slot in slots:
        nodes = slot.nodes.get(lane, {})
        if nodes:
            until = min(before[name] for name in nodes)
            yield from ((until, use) for use in waiting)
            waiting = []
        waiting += slot.uses.get(lane, ())
