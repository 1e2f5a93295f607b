"""All-gather sharded parameters just before use, into a bounded number of buffers.

Parameters that are still in a buffer are not gathered again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeGuard

from piper.errors import Refused
from piper.ir.dag import Dag
from piper.ir.naming import weights
from piper.ir.nodes import Collective, Compute, Kind, Node
from piper.ir.placement.residency import Residency
from piper.ir.values import Value
from piper.names import BucketId, NodeId, ValueId
from piper.passes.bucket_homes import bucket_homes
from piper.passes.buffer_slots import BufferSlots
from piper.passes.orders.early_gathers import Early, early_gathers
from piper.passes.orders.message_orders import with_gather_orders
from piper.passes.orders.order_problems import too_few_buffers
from piper.passes.orders.sharded_reads import bucket_of, sharded_reads
from piper.passes.reductions import gather_of
from piper.passes.resequence import resequenced
from piper.passes.spare_memory import spare_memory


def place_gathers(dag: Dag) -> Dag:
    """The DAG with a gather before each use whose parameters are not in a buffer.

    Gathers that run once per step start equally far ahead of their first use.

    rewrite:
        F(PP=0) ... B(PP=0)                      zero=3, one buffer, others use it in between
        -->
        gather -> F(PP=0) ... gather -> B(PP=0)
    """
    orders = lane_orders(dag)
    early = early_gathers(dag, orders)
    filled = [
        Pool(dag, order, how, lane, early[lane])
        for lane, order in orders.items()
        for how in pools(dag, order)
    ]
    for pool in filled:
        pool.fill()
    gathered = with_slots(with_gathers(just_ahead(dag, orders), filled), filled)
    return as_ordered(gathered, filled) if dag.message_orders else gathered


def as_ordered(dag: Dag, filled: list[Pool]) -> Dag:
    """Orders that name these gathers become edges, and the sequence follows them."""
    uses = {name: use for pool in filled for name, use in pool.made_for.items()}
    return resequenced(with_gather_orders(dag, uses))


def just_ahead(dag: Dag, orders: dict[int, list[Compute]]) -> Dag:
    """Move single gathers next to their first use.

    If all of them started with the step, the first one would share its link with the others.
    """
    gathers = [node for node in dag.nodes.values() if is_gather(node)]
    ordered = {name for p in dag.precedences if p.partial for name in (*p.before, *p.after)}
    singles = {
        node.writes[0]: node for node in gathers if stays(dag, node) and node.id not in ordered
    }
    if not singles:
        return dag
    before: dict[NodeId, list[NodeId]] = {}
    moved: set[NodeId] = set()
    for order in orders.values():
        for position, node in enumerate(order):
            if len(moved) == len(singles):
                break
            for value in (total[0] for total in node.reads if total[0] in singles):
                gather = singles[value]
                if gather.id not in moved:
                    how = dag.residencies[bucket_of(dag, value)]
                    ahead = order[max(0, position - how.gather_ahead)]
                    before.setdefault(ahead.id, []).append(gather.id)
                    moved.add(gather.id)
    sequence: list[NodeId] = []
    for name in dag.sequence:
        if name not in moved:
            sequence += [*before.get(name, ()), name]
    return dag.known_to(replace(dag, sequence=tuple(sequence)))


def stays(dag: Dag, gather: Collective) -> bool:
    """Whether only computes read it. A value that is sent on cannot wait for its use here."""
    readers = dag.consumers.get(gather.writes[0], ())
    return all(isinstance(dag.nodes[reader], Compute) for reader in readers)


def lane_orders(dag: Dag) -> dict[int, list[Compute]]:
    """The computes of each lane, in order."""
    table = dag.lanes
    orders: dict[int, list[Compute]] = {}
    for name in dag.sequence:
        node = dag.nodes[name]
        if isinstance(node, Compute) and node.devices:
            orders.setdefault(table[node.devices], []).append(node)
    return orders


def pools(dag: Dag, order: list[Compute]) -> list[Residency]:
    """Buckets with the same residency share their buffers."""
    if not any(how.zero == 3 for how in dag.residencies.values()):
        return []
    buckets = dict.fromkeys(bucket for node in order for bucket in sharded_reads(dag, node))
    return list(dict.fromkeys(dag.residencies[bucket] for bucket in buckets))


@dataclass
class Pool:
    """The gather buffers of one lane."""

    dag: Dag
    order: list[Compute]
    how: Residency
    lane: int
    early: Early  # what orders want gathered before a position, for a later one
    before: dict[int, list[Collective]] = field(default_factory=dict)  # gathers, by position
    values: dict[ValueId, Value] = field(default_factory=dict)
    reads: dict[NodeId, dict[ValueId, ValueId]] = field(default_factory=dict)
    made_for: dict[NodeId, Compute] = field(default_factory=dict)  # by gather
    pinned: dict[BucketId, int] = field(default_factory=dict)  # ordered early: kept for this use

    def __post_init__(self) -> None:
        self.needs = [
            [b for b in sharded_reads(self.dag, node) if self.dag.residencies[b] == self.how]
            for node in self.order
        ]
        together = self.how.gather_buffers * max(map(len, self.needs))
        buckets = {bucket for needed in self.needs for bucket in needed}
        limits = self.limits(min(together, len(buckets)), buckets) if self.how.holds_more else []
        self.size = max(limits, default=min(together, len(buckets)))
        self.slots = BufferSlots(self.size, self.how.gather_ahead, self.needs, limits=limits)
        self.latest: dict[BucketId, ValueId] = {}  # the result of the last gather
        self.homes = bucket_homes(self.dag)

    def limits(self, least: int, buckets: set[BucketId]) -> list[int]:
        """More buffers than asked for where that does not raise the peak."""
        largest = max(sum(spec.nbytes for spec in self.dag.held(bucket)) for bucket in buckets)
        if least == len(buckets) or not largest:
            return [least] * len(self.order)
        spare = spare_memory(self.dag, self.order)
        return [min(least + size // largest, len(buckets)) for size in spare]

    def fill(self) -> None:
        for position, buckets in enumerate(self.needs):
            if self.slots.limits:
                self.slots.evict(position, self.slots.limits[position], (*buckets, *self.pinned))
            for use in self.early.get(position, ()):
                self.prefetch(position, use)
            for bucket in buckets:
                if self.pinned.get(bucket) == position:
                    del self.pinned[bucket]
                if bucket not in self.slots.inside:
                    self.gather(position, bucket, keep=buckets)
                value = self.latest[bucket]
                self.reads.setdefault(self.order[position].id, {})[weights(bucket)] = value
                self.slots.free_from[self.slots.inside[bucket]] = position + 1

    def prefetch(self, position: int, use: int) -> None:
        """An order wants the gathers of a later use before this position."""
        for bucket in self.needs[use]:
            if bucket not in self.slots.inside:
                self.gather(position, bucket, keep=self.needs[position])
                self.pinned[bucket] = use

    def gather(self, position: int, bucket: BucketId, keep: list[BucketId]) -> None:
        slot = self.slots.take(position, bucket, (*keep, *self.pinned))
        if slot is None:
            raise Refused(too_few_buffers(self.order[position].id, self.how, self.pinned))
        node, whole = gather_of(self.dag, bucket, self.how, len(self.values))
        use = self.order[self.slots.next_use(bucket, position - 1)]
        start = self.slots.start(position, slot)
        node = replace(node, devices=self.homes[bucket], slot=slot)
        self.made_for[node.id] = use
        self.before.setdefault(start, []).append(node)
        self.values[node.writes[0]] = whole
        self.latest[bucket] = node.writes[0]


def with_gathers(dag: Dag, filled: list[Pool]) -> Dag:
    """Insert gathers in the sequence before the nodes ahead of which they start."""
    if not filled:
        return dag
    ahead: dict[NodeId, list[Collective]] = {}
    reads: dict[NodeId, dict[ValueId, ValueId]] = {}
    values: dict[ValueId, Value] = {}
    for pool in filled:
        for position, gathers in pool.before.items():
            ahead.setdefault(pool.order[position].id, []).extend(gathers)
        for name, changed in pool.reads.items():
            reads.setdefault(name, {}).update(changed)
        values |= pool.values
    nodes: list[Node] = [rewired(dag.nodes[name], changed) for name, changed in reads.items()]
    nodes += [node for gathers in ahead.values() for node in gathers]
    sequence: list[NodeId] = []
    for name in dag.sequence:
        sequence += [node.id for node in ahead.get(name, ())]
        sequence.append(name)
    wider = dag.with_values(values).with_nodes(nodes)
    return replace(wider, sequence=tuple(sequence))


def rewired(node: Node, changed: dict[ValueId, ValueId]) -> Node:
    return replace(node, reads=tuple((changed.get(t[0], t[0]), *t[1:]) for t in node.reads))


def is_gather(node: Node) -> TypeGuard[Collective]:
    return isinstance(node, Collective) and node.kind is Kind.ALL_GATHER


def with_slots(dag: Dag, filled: list[Pool]) -> Dag:
    """Number the buffers: those of each pool in turn, then one for each single gather."""
    table = dag.lanes
    first: dict[int, int] = {}  # by lane: the next slot
    numbered: list[Node] = []
    for pool in filled:
        base = first.get(pool.lane, 0)
        first[pool.lane] = base + pool.size
        for node in (node for nodes in pool.before.values() for node in nodes):
            numbered.append(replace(node, slot=base + (node.slot or 0)))
    for single in dag.nodes.values():
        if is_gather(single) and single.slot is None:
            lane = table[single.devices]
            numbered.append(replace(single, slot=first.get(lane, 0)))
            first[lane] = first.get(lane, 0) + 1
    return dag.with_nodes(numbered) if numbered else dag
