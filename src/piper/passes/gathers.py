"""Gather sharded parameters just before use, into a bounded number of buffers.

The order of all uses is known by now, so the choice of what to drop is the best one: that which is
used again last. What is still there when it is used again is not gathered again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from piper.ir.cycles import lanes
from piper.ir.dag import Dag
from piper.ir.naming import weights
from piper.ir.nodes import Collective, Compute, Kind, Node
from piper.ir.residency import Residency
from piper.ir.values import Role, Value
from piper.names import BucketId, NodeId, ValueId
from piper.passes.homes import bucket_homes
from piper.passes.reductions import gather_of

Need = dict[BucketId, list[int]]  # positions in a lane's order at which a bucket is used


def place_gathers(dag: Dag) -> Dag:
    """The DAG with a gather wherever a use finds its parameters dropped, or not there yet.

    Gathers that happen once per step come as far ahead of their first use.

    rewrite:
        F(PP=0) ... B(PP=0)                      zero=3, one buffer, others use it in between
        -->
        gather -> F(PP=0) ... gather -> B(PP=0)
    """
    rows = lane_orders(dag)
    done = [Pool(dag, row, how, lane) for lane, row in rows.items() for how in pools(dag, row)]
    for pool in done:
        pool.fill()
    return with_slots(with_gathers(just_ahead(dag, rows), done), done)


def just_ahead(dag: Dag, rows: dict[int, list[Compute]]) -> Dag:
    """Not all at the start: then the first one, which is waited for, would share its link."""
    gathers = [node for node in dag.nodes.values() if is_gather(node)]
    singles = {node.writes[0]: node for node in gathers if stays(dag, node)}
    if not singles:
        return dag
    before: dict[NodeId, list[NodeId]] = {}
    moved: set[NodeId] = set()
    for row in rows.values():
        for position, node in enumerate(row):
            if len(moved) == len(singles):
                break
            for value in (total[0] for total in node.reads if total[0] in singles):
                gather = singles[value]
                if gather.id not in moved:
                    how = dag.residencies[bucket_of(dag, value)]
                    ahead = row[max(0, position - how.gather_ahead)]
                    before.setdefault(ahead.id, []).append(gather.id)
                    moved.add(gather.id)
    sequence: list[NodeId] = []
    for name in dag.sequence:
        if name not in moved:
            sequence += [*before.get(name, ()), name]
    return dag.known_to(replace(dag, sequence=tuple(sequence)))


def stays(dag: Dag, gather: Collective) -> bool:
    """What is sent on to other devices cannot wait for its use here."""
    readers = dag.consumers.get(gather.writes[0], ())
    return all(isinstance(dag.nodes[reader], Compute) for reader in readers)


def lane_orders(dag: Dag) -> dict[int, list[Compute]]:
    """What each lane computes, in order."""
    table = lanes(dag)
    rows: dict[int, list[Compute]] = {}
    for name in dag.sequence:
        node = dag.nodes[name]
        if isinstance(node, Compute) and node.devices:
            rows.setdefault(table[node.devices], []).append(node)
    return rows


def sharded_reads(dag: Dag, node: Compute) -> Iterator[BucketId]:
    """The buckets that a node uses whole, of which its device has a shard only."""
    for total in node.reads:
        known = dag.values[total[0]]
        if known.role is Role.WEIGHTS and not known.copy:
            bucket = bucket_of(dag, total[0])
            how = dag.residencies.get(bucket)
            if how and how.sharded and how.zero == 3:
                yield bucket


def bucket_of(dag: Dag, value: ValueId) -> BucketId:
    bucket = dag.values[value].bucket
    assert bucket is not None, f"{value} is no bucket's"
    return bucket


def pools(dag: Dag, row: list[Compute]) -> list[Residency]:
    """Buckets that are replicated alike share their buffers."""
    if not any(how.zero == 3 for how in dag.residencies.values()):
        return []
    buckets = dict.fromkeys(bucket for node in row for bucket in sharded_reads(dag, node))
    return list(dict.fromkeys(dag.residencies[bucket] for bucket in buckets))


@dataclass
class Pool:
    """The buffers of one lane, as its work goes on."""

    dag: Dag
    row: list[Compute]
    how: Residency
    lane: int
    before: dict[int, list[Collective]] = field(default_factory=dict)  # gathers, by position
    values: dict[ValueId, Value] = field(default_factory=dict)
    reads: dict[NodeId, dict[ValueId, ValueId]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.needs = [
            [b for b in sharded_reads(self.dag, node) if self.dag.residencies[b] == self.how]
            for node in self.row
        ]
        self.uses: Need = {}
        for position, buckets in enumerate(self.needs):
            for bucket in buckets:
                self.uses.setdefault(bucket, []).append(position)
        self.size = self.how.gather_buffers * max(map(len, self.needs))
        self.resident: dict[BucketId, tuple[int, ValueId]] = {}  # slot, gathered value
        self.free_from = [0] * self.size  # since when a slot is not in use
        self.homes = bucket_homes(self.dag)

    def fill(self) -> None:
        for position, buckets in enumerate(self.needs):
            for bucket in buckets:
                if bucket not in self.resident:
                    self.gather(position, bucket, keep=buckets)
                slot, value = self.resident[bucket]
                self.reads.setdefault(self.row[position].id, {})[weights(bucket)] = value
                self.free_from[slot] = position + 1

    def gather(self, position: int, bucket: BucketId, keep: list[BucketId]) -> None:
        slot = self.slot(position, keep)
        node, whole = gather_of(self.dag, bucket, self.how, len(self.values))
        start = max(position - self.how.gather_ahead, self.free_from[slot], 0)
        node = replace(node, devices=self.homes[bucket], slot=slot)
        self.before.setdefault(start, []).append(node)
        self.values[node.writes[0]] = whole
        self.resident[bucket] = (slot, node.writes[0])

    def slot(self, position: int, keep: list[BucketId]) -> int:
        """A free buffer, or that of the bucket that is used again last.

        One that is idle already is better: the gather can start ahead.
        """
        taken = {slot for slot, _ in self.resident.values()}
        free = [slot for slot in range(self.size) if slot not in taken]
        if free:
            return free[0]
        idle = [bucket for bucket in self.resident if bucket not in keep]
        early = position - self.how.gather_ahead
        ready = [bucket for bucket in idle if self.free_from[self.resident[bucket][0]] <= early]
        victim = max(ready or idle, key=lambda bucket: self.next_use(bucket, position))
        return self.resident.pop(victim)[0]

    def next_use(self, bucket: BucketId, position: int) -> int:
        uses = self.uses[bucket]
        k = bisect_right(uses, position)
        return uses[k] if k < len(uses) else len(self.row)


def with_gathers(dag: Dag, done: list[Pool]) -> Dag:
    """Gathers stand in the sequence before the work that they were started ahead of."""
    if not done:
        return dag
    ahead: dict[NodeId, list[Collective]] = {}
    reads: dict[NodeId, dict[ValueId, ValueId]] = {}
    values: dict[ValueId, Value] = {}
    for pool in done:
        for position, gathers in pool.before.items():
            ahead.setdefault(pool.row[position].id, []).extend(gathers)
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


def with_slots(dag: Dag, done: list[Pool]) -> Dag:
    """Give every gather a buffer: pools one after the other, single gathers one of their own."""
    table = lanes(dag)
    first: dict[int, int] = {}  # by lane: the next slot
    numbered: list[Node] = []
    for pool in done:
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
