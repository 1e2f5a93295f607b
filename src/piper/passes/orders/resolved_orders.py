"""The nodes that the slots of an order name, once messages and updates are nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from piper.errors import DirectiveError
from piper.ir.dag import Dag
from piper.ir.message_order import MessageOrder, OrderSlot, named_passes
from piper.ir.nodes import Compute, Node, Transfer
from piper.ir.operations import operation_index, use_index
from piper.names import Device, NodeId, Operation
from piper.passes.orders.order_problems import in_two_slots, nothing_matches
from piper.passes.orders.sharded_reads import sharded_reads

Lane = int
ByLane = dict[Lane, dict[NodeId, None]]


@dataclass
class ResolvedSlot:
    """The nodes of a slot on each lane, and the passes that wait for gathers to be made."""

    nodes: ByLane = field(default_factory=dict)
    uses: ByLane = field(default_factory=dict)
    later: ByLane = field(default_factory=dict)  # passes of the next step
    sent: ByLane = field(default_factory=dict)  # control messages that leave before it
    arrivals: ByLane = field(default_factory=dict)  # the same, where they arrive
    is_pass: bool = True  # it names passes of regions only

    @property
    def lanes(self) -> dict[Lane, None]:
        return dict.fromkeys((*self.nodes, *self.uses))

    def all_nodes(self) -> list[NodeId]:
        return [name for names in self.nodes.values() for name in names]


class Resolver:
    """Finds the nodes of each slot. `uses`: passes for which gathers have been made by now."""

    def __init__(self, dag: Dag, uses: Mapping[NodeId, Compute] | None = None) -> None:
        self.dag = dag
        self.orders = dag.message_orders
        self.lane_of = dag.lanes
        self.index = operation_index(dag, uses)
        later = () if uses is not None else dag.computes
        self.uses = use_index(dag, (node for node in later if any(sharded_reads(dag, node))))

    def all_slots(self) -> list[list[ResolvedSlot]]:
        return [self.slots(order) for order in self.orders]

    def slots(self, order: MessageOrder) -> list[ResolvedSlot]:
        found = [self.slot(order, slot) for slot in order.slots]
        seen: dict[NodeId, int] = {}
        for number, slot in enumerate(found):
            for name in slot.all_nodes():
                if seen.setdefault(name, number) != number:
                    problem = in_two_slots(name, seen[name], number)
                    raise DirectiveError(str(order.maker), problem)
        return found

    def slot(self, order: MessageOrder, slot: OrderSlot) -> ResolvedSlot:
        found = ResolvedSlot(is_pass=not slot.filters)
        self.add(found.nodes, slot.nodes)
        self.add(found.later, slot.later)
        self.add(found.sent, slot.arrivals, sends=True)
        self.add(found.arrivals, slot.arrivals)
        for wanted in slot.filters:
            names, later = self.index.select(wanted), self.uses.select(wanted)
            if not names and not later:
                problem = nothing_matches(self.dag, self.index, self.uses, wanted)
                raise DirectiveError(str(order.maker), problem)
            self.add(found.nodes, names, sends=Operation.SEND in named_passes(wanted))
            self.add(found.uses, later)
        return found

    def add(self, to: ByLane, names: Iterable[NodeId], sends: bool = False) -> None:
        for name in names:
            node = self.dag.nodes[name]
            devices = node.source if isinstance(node, Transfer) and sends else node.devices
            assert devices is not None
            to.setdefault(self.lane_of[devices], {})[name] = None

    def end(self, lane: Lane, node: Node) -> tuple[Device, ...]:
        """The devices of a node on a lane: a transfer has an end there."""
        if isinstance(node, Transfer) and self.lane_of[node.devices] != lane:
            return node.source
        assert node.devices is not None
        return node.devices
