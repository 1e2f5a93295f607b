"""Split backwards into BI and BW before a message of their input gradients, which BW hides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.message_order import MessageOrder
from piper.ir.nodes import Node, Precedence
from piper.ir.placement.placements import LOCAL
from piper.ir.training import split_backward
from piper.names import B, NodeId, RegionId

SPLIT_BACKWARDS = Maker("split backwards")


def split_backwards(dag: Dag) -> Dag:
    """A backward whose input gradients go through a token all-to-all or a conversion is split.

    rewrite:
        B(EP=0) -> all-to-all
        -->
        BI(EP=0) -> all-to-all        BW runs while tokens are in flight
               \\-> BW(EP=0)
    """
    wanted = beside_experts(dag) | beside_conversions(dag)
    pairs = {
        node.id: split_backward(dag, node)
        for node in dag.computes
        if node.phase is B and node.region in wanted
    }
    if not pairs:
        return dag
    nodes: dict[NodeId, Node] = {}
    for node in dag.nodes.values():
        nodes.update((part.id, part) for part in pairs.get(node.id, (node,)))
    makers = {name: dag.makers.get(name, SPLIT_BACKWARDS) for name in nodes}
    halves = {name: tuple(part.id for part in pair) for name, pair in pairs.items()}
    orders = tuple(renamed(dag.precedences, halves))
    later = tuple(split_order(order, halves) for order in dag.message_orders)
    stricter = tuple(tuple(renamed(orders, halves)) for orders in dag.stricter)
    return replace(
        dag, nodes=nodes, makers=makers, precedences=orders, stricter=stricter, message_orders=later
    )


def split_order(order: MessageOrder, halves: dict[NodeId, tuple[NodeId, ...]]) -> MessageOrder:
    """An order that waits for its messages, with BI and BW in place of B."""

    def split(names: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        return tuple(part for name in names for part in halves.get(name, (name,)))

    slots = (replace(s, nodes=split(s.nodes), later=split(s.later)) for s in order.slots)
    return replace(order, slots=tuple(slots))


def beside_experts(dag: Dag) -> set[RegionId]:
    """Sharded regions and their readers: the input gradients of both go through an all-to-all."""
    outputs = {v for r in dag.shardings for v in dag.model.by_id[r].outputs}
    readers = {r.id for r in dag.model.regions if not outputs.isdisjoint(r.inputs)}
    return {r for r in (*dag.shardings, *readers) if dag.model.trained(dag.model.by_id[r])}


def beside_conversions(dag: Dag) -> set[RegionId]:
    """Regions whose input gradients go through a message of a conversion."""
    if not dag.divisions:
        return set()
    sent = {
        value
        for value, region in dag.model.conversions.items()
        if region.conversion and region.conversion.backward not in LOCAL
    }
    trained = (r for r in dag.model.regions if dag.model.trained(r))
    return {r.id for r in trained if any(r.inputs[k] in sent for k in r.input_grads)}


def renamed(
    orders: Sequence[Precedence], halves: dict[NodeId, tuple[NodeId, ...]]
) -> Iterator[Precedence]:
    """Orders with BI and BW in place of B.

    If an order is loose, BW need not run before the next slot, but before the slot after that.
    """
    after: dict[tuple[NodeId, ...], list[Precedence]] = {}
    for order in orders:
        after.setdefault(order.before, []).append(order)

    def parts(names: tuple[NodeId, ...], which: slice = slice(None)) -> tuple[NodeId, ...]:
        return tuple(part for name in names for part in halves.get(name, (name,))[which])

    for order in orders:
        late = tuple(halves[name][1] for name in order.before if name in halves)
        if order.loose and late:
            yield replace(order, before=parts(order.before, slice(1)), after=parts(order.after))
            for one in after.get(order.after, ()):
                yield replace(order, before=late, after=parts(one.after))
        else:
            yield replace(order, before=parts(order.before), after=parts(order.after))
