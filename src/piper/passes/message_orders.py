"""Orders that name messages and updates become temporal edges, now that these are nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from piper.errors import DirectiveError
from piper.ir.cycles import lanes
from piper.ir.dag import Dag
from piper.ir.message_order import MessageOrder, OrderSlot, named_passes
from piper.ir.nodes import Compute, Precedence, Transfer
from piper.ir.operations import operation_index, use_index
from piper.names import NodeId, Operation
from piper.passes.order_problems import in_two_slots, nothing_matches, unrelated
from piper.passes.reachability import unreached
from piper.passes.sharded_reads import sharded_reads

Lane = int
ByLane = dict[Lane, dict[NodeId, None]]


def place_message_orders(dag: Dag) -> Dag:
    """Each slot runs before the next, on its devices, whatever it names.

    Gathers with zero=3 are made later. Until then, the passes that they are for come after what
    the gathers come after; `gathers` does the rest.

    rewrite:
        B(PP=1)    all-reduce(PP=0) -> update(PP=0)      Order([[B(PP=1)], [REDUCE(PP=0)]])
        -->
        B(PP=1) -> all-reduce(PP=0) -> update(PP=0)
    """
    if not dag.message_orders:
        return dag
    resolver = Resolver(dag)
    found = [(order, resolver.slots(order)) for order in dag.message_orders]
    resolver.require_meeting(found)
    new = [edge for order, slots in found for edge in precedences(dag, order, slots)]
    later = tuple(order for order, slots in found if any(slot.uses for slot in slots))
    ordered = dag.with_precedences(new)
    return ordered.known_to(replace(ordered, message_orders=later))


def with_gather_orders(dag: Dag, uses: Mapping[NodeId, Compute]) -> Dag:
    """The edges of orders that name gathers with zero=3, each made for one of `uses`."""
    resolver = Resolver(dag, uses)
    new = [
        edge
        for order in dag.message_orders
        for edge in precedences(dag, order, resolver.slots(order))
    ]
    ordered = dag.with_precedences(new)
    return ordered.known_to(replace(ordered, message_orders=()))


@dataclass
class ResolvedSlot:
    """The nodes of a slot on each lane, and the passes that wait for gathers to be made."""

    nodes: ByLane = field(default_factory=dict)
    uses: ByLane = field(default_factory=dict)
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
        self.lane_of = lanes(dag)
        self.index = operation_index(dag, uses)
        later = () if uses is not None else dag.computes
        self.uses = use_index(dag, (node for node in later if any(sharded_reads(dag, node))))

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

    def require_meeting(self, found: Sequence[tuple[MessageOrder, list[ResolvedSlot]]]) -> None:
        """Neighbouring slots have a device in common, or the dataflow orders them already."""
        apart = [
            (order, one, other)
            for order, slots in found
            for one, other in pairwise(slot for slot in slots if slot.lanes)
            if not (one.is_pass and other.is_pass) and not one.lanes.keys() & other.lanes.keys()
        ]
        for order, one, other in apart:
            if one.uses or other.uses:
                names = [[*s.all_nodes(), *(u for us in s.uses.values() for u in us)][0]
                         for s in (one, other)]  # fmt: skip
                raise DirectiveError(str(order.maker), unrelated(self.dag, *names))
        pairs = [(one.all_nodes(), other.all_nodes()) for _, one, other in apart]
        for (order, _, _), missing in zip(apart, unreached(self.dag, pairs), strict=True):
            if missing:
                raise DirectiveError(str(order.maker), unrelated(self.dag, *missing))


def precedences(
    dag: Dag, order: MessageOrder, slots: Sequence[ResolvedSlot]
) -> Iterator[Precedence]:
    """Edges between consecutive slots of each lane. Those between passes are there already."""
    for lane in dict.fromkeys(lane for slot in slots for lane in slot.lanes):
        last: tuple[NodeId, ...] = ()
        for slot in slots:
            nodes, uses = tuple(slot.nodes.get(lane, ())), tuple(slot.uses.get(lane, ()))
            names = (*last, *nodes, *uses)
            passes = not uses and all(isinstance(dag.nodes[name], Compute) for name in names)
            if last and (nodes or uses) and not passes:
                yield Precedence(last, (*nodes, *uses), order.maker, partial=True)
            last = nodes or last
