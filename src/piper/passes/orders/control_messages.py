"""Orders between devices that nothing else connects: a small message carries them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from piper.errors import DirectiveError
from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.message_order import MessageOrder
from piper.ir.naming import arrived, control, transfer_id
from piper.ir.nodes import Compute, Transfer
from piper.ir.placement.replicas import distinct
from piper.ir.values import Role, TensorSpec, Value
from piper.names import CONTROL_STREAM, Device, NodeId
from piper.passes.orders.order_problems import gathered_elsewhere
from piper.passes.orders.reachability import ancestors, unreached
from piper.passes.orders.resolved_orders import ByLane, ResolvedSlot, Resolver

Devices = tuple[Device, ...]
NOTHING = Value((TensorSpec((), "int64"),), Role.CONTROL)


@dataclass(frozen=True, slots=True)
class Gap:
    """Neighbouring slots of an order without a device in common."""

    order: int
    slot: int  # the second one
    one: ResolvedSlot
    other: ResolvedSlot


def with_control_messages(
    dag: Dag, resolver: Resolver, found: Sequence[Sequence[ResolvedSlot]]
) -> Dag:
    """Where neighbouring slots have no device in common and the dataflow does not order them,
    replica i of the first sends a number to replica i of the second.

    rewrite:
        B(PP=1) [1]   all-reduce(PP=0) [0]         Order([[B(PP=1)], [REDUCE(PP=0)]])
        -->
        B(PP=1) [1] -> Transfer 1 => 0 -> all-reduce(PP=0) [0]
    """
    messages = ControlMessages(dag, resolver)
    for gap in gaps(dag, found):
        messages.bridge(gap)
    for number, slots in enumerate(found):
        for slot, (one, other) in enumerate(pairwise(slots), start=1):
            if other.later:
                messages.before_next_step(Gap(number, slot, one, other))
    return messages.sent() if messages.transfers else dag


def gaps(dag: Dag, found: Sequence[Sequence[ResolvedSlot]]) -> Iterator[Gap]:
    apart = [gap for number, slots in enumerate(found) for gap in neighbours(number, slots)]
    pairs = [(gap.one.all_nodes(), gap.other.all_nodes()) for gap in apart]
    for gap, missing in zip(apart, unreached(dag, pairs), strict=True):
        if missing or gap.one.uses or gap.other.uses:
            yield gap


def neighbours(number: int, slots: Sequence[ResolvedSlot]) -> Iterator[Gap]:
    """Passes of two devices that an order names one after the other are only in its order."""
    here = [(k, slot) for k, slot in enumerate(slots) if slot.lanes]
    for (_, one), (k, other) in pairwise(here):
        passes = one.is_pass and other.is_pass
        if not passes and one.lanes.keys().isdisjoint(other.lanes):
            yield Gap(number, k, one, other)


@dataclass
class ControlMessages:
    """The messages so far, and the slots that wait for them."""

    dag: Dag
    resolver: Resolver
    transfers: list[Transfer] = field(default_factory=list)
    makers: dict[NodeId, Maker] = field(default_factory=dict)
    arrivals: dict[tuple[int, int], list[NodeId]] = field(default_factory=dict)

    def bridge(self, gap: Gap) -> None:
        targets = {lane: {**gap.other.nodes.get(lane, {}), **gap.other.uses.get(lane, {})}
                   for lane in gap.other.lanes}  # fmt: skip
        self.connect(gap, gap.one.nodes, targets)

    def before_next_step(self, gap: Gap) -> None:
        """A device begins the next step after all of this one. So does what needs its results."""
        for lane, names in gap.other.later.items():
            sources = {a: n for a, n in gap.one.nodes.items() if a not in self.before(lane, names)}
            self.connect(gap, sources, {lane: names})

    def before(self, lane: int, names: dict[NodeId, None]) -> set[int]:
        """The lanes on which all of these passes need something, and their own."""
        lane_of = self.resolver.lane_of
        found = [
            {lane_of[devices] for one in ancestors(self.dag, name)
             if isinstance(node := self.dag.nodes[one], Compute) and (devices := node.devices)}
            for name in names
        ]  # fmt: skip
        return {lane, *set.intersection(*found)}

    def connect(self, gap: Gap, before: ByLane, after: ByLane) -> None:
        maker = self.resolver.orders[gap.order].maker
        if gap.one.uses:
            first = next(name for names in gap.one.uses.values() for name in names)
            second = next(name for names in after.values() for name in names)
            raise DirectiveError(str(maker), gathered_elsewhere(self.dag, first, second))
        for source, target in product(self.lists(before), self.lists(after)):
            transfer = self.message(source, target)
            self.transfers.append(transfer)
            self.makers[transfer.id] = maker
            self.arrivals.setdefault((gap.order, gap.slot), []).append(transfer.id)

    def lists(self, found: ByLane) -> list[Devices]:
        """The device lists of these nodes, with one device for each replica."""
        nodes = ((lane, self.dag.nodes[name]) for lane, names in found.items() for name in names)
        return list(
            dict.fromkeys(self.replicas(self.resolver.end(lane, node)) for lane, node in nodes)
        )

    def replicas(self, devices: Devices) -> Devices:
        rows, wanted = self.dag.replicas.lists, set(devices)
        if devices in rows:
            return devices
        return next(row for row in rows if wanted <= set(distinct(row)))

    def message(self, source: Devices, target: Devices) -> Transfer:
        value = control(len(self.transfers))
        there = arrived(value, target)
        return Transfer(
            id=transfer_id(there), reads=((value,),), writes=(there,), source=source,
            devices=target, stream=CONTROL_STREAM,
        )  # fmt: skip

    def sent(self) -> Dag:
        """The DAG with the messages, and orders that wait for them."""
        values = [v for one in self.transfers for v in (one.reads[0][0], one.writes[0])]
        dag = self.dag.with_values(dict.fromkeys(values, NOTHING)).with_nodes(self.transfers)
        orders = tuple(self.waiting(k, order) for k, order in enumerate(self.resolver.orders))
        return replace(dag, makers={**dag.makers, **self.makers}, message_orders=orders)

    def waiting(self, number: int, order: MessageOrder) -> MessageOrder:
        found = ((s, self.arrivals.get((number, k), ())) for k, s in enumerate(order.slots))
        slots = (replace(slot, arrivals=tuple(names)) if names else slot for slot, names in found)
        return replace(order, slots=tuple(slots))
