"""Orders that name messages and updates become temporal edges, now that these are nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.message_order import MessageOrder
from piper.ir.nodes import Compute, Precedence
from piper.names import NodeId
from piper.passes.orders.control_messages import with_control_messages
from piper.passes.orders.resolved_orders import ResolvedSlot, Resolver


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
    found = resolver.all_slots()
    connected = with_control_messages(dag, resolver, found)
    if connected is not dag:
        dag, resolver = connected, Resolver(connected)
        found = resolver.all_slots()
    pairs = list(zip(dag.message_orders, found, strict=True))
    new = [edge for order, slots in pairs for edge in precedences(dag, order, slots)]
    later = tuple(order for order, slots in pairs if any(slot.uses for slot in slots))
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


def precedences(
    dag: Dag, order: MessageOrder, slots: Sequence[ResolvedSlot]
) -> Iterator[Precedence]:
    """Edges between consecutive slots of each lane. Those between passes are there already."""
    for lane in dict.fromkeys(lane for slot in slots for lane in slot.lanes):
        last: tuple[NodeId, ...] = ()
        for slot in slots:
            sent = tuple(slot.sent.get(lane, ()))
            if last and sent:
                yield Precedence(last, sent, order.maker, partial=True)
            nodes, uses = tuple(slot.nodes.get(lane, ())), tuple(slot.uses.get(lane, ()))
            before = (*last, *slot.arrivals.get(lane, ()))
            names = (*before, *nodes, *uses)
            passes = not uses and all(isinstance(dag.nodes[name], Compute) for name in names)
            if before and (nodes or uses) and not passes:
                yield Precedence(before, (*nodes, *uses), order.maker, partial=True)
            last = nodes or last
