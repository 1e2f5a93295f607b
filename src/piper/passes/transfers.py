"""Insert a Transfer wherever a value is read on other devices than those that wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.naming import TOTALS, arrived, transfer_id, updated, weights
from piper.ir.nodes import (
    Collective,
    Compute,
    Node,
    Precedence,
    Redistribute,
    Sum,
    Tags,
    Totals,
    Transfer,
    Update,
)
from piper.ir.placement.replicas import distinct
from piper.ir.values import PER_DEVICE, Value
from piper.names import WEIGHTS_STREAM, BucketId, RegionId, ValueId
from piper.passes.bucket_homes import Devices, bucket_homes, bucket_replicas

USED_FIRST = Maker("used, then updated")


def insert_transfers(dag: Dag) -> Dag:
    """Replica i sends to replica i. A sum is computed where its parts are, and then sent once.

    rewrite:
        F(PP=0) [0]  ->  F(PP=1) [1]
        -->
        F(PP=0) [0]  ->  Transfer 0 => 1  ->  F(PP=1) [1]
    """
    rewrite = Transfers(dag)
    nodes = [rewrite.localised(node) for node in dag.nodes.values()]
    copies = weight_copies(dag, rewrite)
    done = dag.with_values(rewrite.values).with_nodes(
        (*nodes, *rewrite.transfers.values(), *copies)
    )
    return done.with_precedences(uses_before_updates(done, rewrite.copies_at_home()))


def uses_before_updates(
    dag: Dag, copies: Mapping[ValueId, Sequence[ValueId]]
) -> Iterator[Precedence]:
    """A use without a gradient has no data edge to the update, but must run before it. `copies` are
    in the same memory on some device."""
    untrained: dict[BucketId, set[RegionId]] = {}
    for region in dag.model.regions:
        for bucket in set(region.buckets) - set(dag.model.trained(region)):
            untrained.setdefault(bucket, set()).add(region.id)
    for node in dag.nodes.values():
        if isinstance(node, Update) and (node.bucket in untrained or dag.residencies):
            state = dag.values[node.writes[0]].state
            assert state is not None
            free = untrained.get(node.bucket, set())
            for memory in (state, *copies.get(state, ())):
                uses = [
                    use.id
                    for use in map(dag.nodes.__getitem__, dag.consumers.get(memory, ()))
                    if isinstance(use, Collective)
                    or (isinstance(use, Compute) and use.region in free)
                ]
                if uses:
                    yield Precedence(tuple(dict.fromkeys(uses)), (node.id,), USED_FIRST)


@dataclass
class Transfers:
    """The state of the pass: the transfers, values and copies so far."""

    dag: Dag
    transfers: dict[tuple[Sum, Devices], Transfer] = field(default_factory=dict)
    values: dict[ValueId, Value] = field(default_factory=dict)
    copies: dict[ValueId, tuple[ValueId, Devices]] = field(default_factory=dict)  # value, replicas
    homes: dict[ValueId, Devices] = field(init=False)

    def __post_init__(self) -> None:
        self.replicas = bucket_replicas(self.dag)
        found = bucket_homes(self.dag)
        self.homes = {weights(bucket): home for bucket, home in found.items()}

    def localised(self, node: Node) -> Node:
        """The node, which now reads only values on its own devices."""
        if isinstance(node, Totals):
            return replace(node, reads=(node.reads[0], *self.as_updated(node.reads[1:])))
        here, tags = node.devices, node.tags
        assert here is not None
        common = not isinstance(node, Compute)
        at = self.replicas_of(node) if common else here
        reads = tuple([self.local(total, at, tags, common) for total in node.reads])
        if reads == node.reads:
            return node
        if isinstance(node, Compute):  # faster than replace, and this is most of the pass
            return Compute(
                id=node.id, region=node.region, phase=node.phase, microbatch=node.microbatch,
                tags=tags, reads=reads, writes=node.writes, devices=here, stream=node.stream,
            )  # fmt: skip
        return replace(node, reads=reads)

    def replicas_of(self, node: Node) -> Devices:
        """The device of each replica of a bucket that is reduced or updated."""
        bucket = self.dag.values[node.writes[0]].bucket if node.writes else None
        return self.replicas[bucket] if bucket else node.devices or ()

    def as_updated(self, totals: Sequence[Sum]) -> Iterator[Sum]:
        """The gradients of the norm, on the devices of their update."""
        nodes = self.dag.nodes.values()
        home = {node.reads[0]: node for node in nodes if isinstance(node, Update)}
        for total in totals:
            yield self.local(total, self.replicas_of(home[total]), (), common=True)

    def local(self, total: Sum, here: Devices, tags: Tags, common: bool) -> Sum:
        """The sum, of values that are here. `common`: for all replicas of a device together."""
        if len(total) == 1:
            if total[0] in self.homes:
                return (self.weight_copy(total[0], here),)
            at = self.devices_of(total[0], here, common)
            return total if at is here or at == here else (self.send(total, at, here, tags),)
        parts: dict[Devices, list[ValueId]] = {}
        for value in total:
            parts.setdefault(self.devices_of(value, here, common), []).append(value)
        if list(parts) == [here]:
            return total
        sent = [(self.send(tuple(p), at, here, tags),) for at, p in parts.items() if at != here]
        return (*parts.get(here, ()), *chain.from_iterable(sent))

    def devices_of(self, value: ValueId, here: Devices, common: bool) -> Devices:
        """Where a value is. The norm, inputs, loss weights and counters are everywhere."""
        maker = self.dag.producers.get(value)
        if maker is None or value == TOTALS:
            return here
        at = self.dag.nodes[maker].devices or here
        if at is here or at == here or distinct(at) != distinct(here):
            return at
        return here if common or self.dag.values[value].role in PER_DEVICE else at

    def send(self, total: Sum, source: Devices, here: Devices, tags: Tags) -> ValueId:
        known = self.dag.values[total[0]]
        if known.role in PER_DEVICE and known.bucket:
            source, here = once_each(self.replicas[known.bucket], here)
        found = self.transfers.get((total, here))
        if found is None:
            there = arrived(total[0], here)
            self.values[there] = known
            found = self.transfers[total, here] = Transfer(
                id=transfer_id(there), tags=tags, reads=(total,), writes=(there,),
                source=source, devices=here, stream=self.stream(total[0]),
            )  # fmt: skip
        return found.writes[0]

    def stream(self, value: ValueId) -> str:
        maker = self.dag.nodes[self.dag.producers[value]]
        if isinstance(maker, Redistribute):
            return maker.onward
        return (maker.stream or "pp") if isinstance(maker, Compute) else WEIGHTS_STREAM

    def weight_copy(self, value: ValueId, here: Devices) -> ValueId:
        """A parameter that is used away from its home has a copy there, refreshed after updates."""
        if self.homes[value] == distinct(here):
            return value
        copy = arrived(value, distinct(here))
        self.values[copy] = replace(self.dag.values[value], copy=True)
        self.copies.setdefault(copy, (value, here))
        return copy

    def copies_at_home(self) -> dict[ValueId, list[ValueId]]:
        """By parameter, the copies that some device reads at home, because it has both."""
        found: dict[ValueId, list[ValueId]] = {}
        for copy, (value, here) in self.copies.items():
            if not set(here).isdisjoint(self.homes[value]):
                found.setdefault(value, []).append(copy)
        return found


def once_each(source: Devices, here: Devices) -> tuple[Devices, Devices]:
    """What replicas on a device have in common is sent there once: by the first one's source."""
    devices = distinct(here)
    if len(devices) == len(here):
        return source, here
    return tuple(source[here.index(device)] for device in devices), devices


def weight_copies(dag: Dag, rewrite: Transfers) -> list[Node]:
    """After an update, the new parameters go to every copy."""
    made: list[Node] = []
    for copy, (value, here) in rewrite.copies.items():
        new, bucket = updated(value), dag.values[value].bucket
        if new in dag.producers and bucket:
            there = updated(copy)
            source, devices = once_each(rewrite.replicas[bucket], here)
            rewrite.values[there] = replace(dag.values[new], copy=True, state=copy)
            made.append(
                Transfer(
                    id=transfer_id(there),
                    reads=((new,),),
                    writes=(there,),
                    source=source,
                    devices=devices,
                    stream=WEIGHTS_STREAM,
                )  # fmt: skip
            )
    return made
