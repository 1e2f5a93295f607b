"""When orders want gathers of zero=3 to happen: positions in the order of passes of a lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.names import NodeId
from piper.passes.message_orders import ResolvedSlot, Resolver

Positions = dict[NodeId, tuple[int, int]]


@dataclass
class GatherWindows:
    """By the pass that a gather is for: it starts at `after` or later, and ends before `until`."""

    after: dict[NodeId, int] = field(default_factory=dict)
    until: dict[NodeId, int] = field(default_factory=dict)

    def early(self, order: Sequence[Compute]) -> dict[int, list[int]]:
        """Positions before which gathers must have started: those of the passes they are for."""
        place = {node.id: k for k, node in enumerate(order)}
        found: dict[int, list[int]] = {}
        for use, until in self.until.items():
            if use in place and until < place[use]:
                found.setdefault(until, []).append(place[use])
        return found


def gather_windows(dag: Dag, orders: dict[int, list[Compute]]) -> dict[int, GatherWindows]:
    """The windows of each lane, of all orders that name gathers with zero=3."""
    windows = {lane: GatherWindows() for lane in orders}
    if not dag.message_orders:
        return windows
    resolver = Resolver(dag)
    found = [resolver.slots(order) for order in dag.message_orders]
    for lane, order in orders.items():
        here = positions(dag, order)
        for slots in found:
            add_windows(windows[lane], [slot for slot in slots if lane in slot.lanes], lane, here)
    return windows


def positions(dag: Dag, order: Sequence[Compute]) -> Positions:
    """For each node of the sequence, how many passes of a lane come before it and behind it."""
    mine, found, count = {node.id for node in order}, Positions(), 0
    for name in dag.sequence:
        found[name] = count, count + (name in mine)
        count += name in mine
    return found


def add_windows(
    windows: GatherWindows, slots: Sequence[ResolvedSlot], lane: int, here: Positions
) -> None:
    """Between the nearest slots on both sides that have nodes already."""
    after = 0
    waiting: list[NodeId] = []
    for slot in slots:
        nodes = slot.nodes.get(lane, {})
        if nodes:
            until = min(here[name][0] for name in nodes)
            for use in waiting:
                windows.until[use] = min(windows.until.get(use, until), until)
            waiting = []
        for use in slot.uses.get(lane, ()):
            windows.after[use] = max(windows.after.get(use, 0), after)
            waiting.append(use)
        after = max([after, *(here[name][1] for name in nodes)])
