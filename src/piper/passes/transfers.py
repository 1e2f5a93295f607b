"""Insert a Transfer wherever a value is read on other devices than those that wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from piper.ir.values import Value
from piper.names import WEIGHTS_STREAM, BucketId, RegionId, ValueId
from piper.passes.bucket_homes import Devices, bucket_homes

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
    return done.with_precedences(uses_before_updates(done))


def uses_before_updates(dag: Dag) -> Iterator[Precedence]:
    """A use without a gradient has no data edge to the update, but must run before it."""
    untrained: dict[BucketId, set[RegionId]] = {}
    for region in dag.model.regions:
        for bucket in set(region.buckets) - set(dag.model.trained(region)):
            untrained.setdefault(bucket, set()).add(region.id)
    for node in dag.nodes.values():
        if isinstance(node, Update) and (node.bucket in untrained or dag.residencies):
            state = dag.values[node.writes[0]].state
            assert state is not None
            free = untrained.get(node.bucket, set())
            uses = [
                use.id
                for use in map(dag.nodes.__getitem__, dag.consumers.get(state, ()))
                if isinstance(use, Collective) or (isinstance(use, Compute) and use.region in free)
            ]
            if uses:
                yield Precedence(tuple(dict.fromkeys(uses)), (node.id,), USED_FIRST)


@dataclass
class Transfers:
    """The state of the pass: the transfers, values and copies so far."""

    dag: Dag
    transfers: dict[tuple[Sum, Devices], Transfer] = field(default_factory=dict)
    values: dict[ValueId, Value] = field(default_factory=dict)
    copies: dict[tuple[ValueId, Devices], ValueId] = field(default_factory=dict)
    homes: dict[ValueId, Devices] = field(init=False)

    def __post_init__(self) -> None:
        found = bucket_homes(self.dag)
        self.homes = {weights(bucket): home for bucket, home in found.items()}

    def localised(self, node: Node) -> Node:
        """The node, which now reads only values on its own devices."""
        if isinstance(node, Totals):
            return replace(node, reads=(node.reads[0], *self.as_updated(node.reads[1:])))
        here, tags = node.devices, node.tags
        assert here is not None
        reads = tuple([self.local(total, here, tags) for total in node.reads])
        if reads == node.reads:
            return node
        if isinstance(node, Compute):  # faster than replace, and this is most of the pass
            return Compute(
                id=node.id, region=node.region, phase=node.phase, microbatch=node.microbatch,
                tags=tags, reads=reads, writes=node.writes, devices=here, stream=node.stream,
            )  # fmt: skip
        return replace(node, reads=reads)

    def as_updated(self, totals: Sequence[Sum]) -> Iterator[Sum]:
        """The gradients of the norm, on the devices of their update."""
        nodes = self.dag.nodes.values()
        home = {node.reads[0]: node.devices for node in nodes if isinstance(node, Update)}
        for total in totals:
            devices = home[total]
            assert devices is not None
            yield self.local(total, devices, ())

    def local(self, total: Sum, here: Devices, tags: Tags) -> Sum:
        if len(total) == 1:
            if total[0] in self.homes:
                return (self.weight_copy(total[0], here),)
            if self.devices_of(total[0], here) == here:
                return total
        parts: dict[Devices, list[ValueId]] = {}
        for value in total:
            parts.setdefault(self.devices_of(value, here), []).append(value)
        if list(parts) == [here]:
            return total
        sent = [(self.send(tuple(p), at, here, tags),) for at, p in parts.items() if at != here]
        return (*parts.get(here, ()), *chain.from_iterable(sent))

    def devices_of(self, value: ValueId, here: Devices) -> Devices:
        """Where a value is. The norm, inputs, loss weights and counters are everywhere."""
        maker = self.dag.producers.get(value)
        if maker is None or value == TOTALS:
            return here
        return self.dag.nodes[maker].devices or here

    def send(self, total: Sum, source: Devices, here: Devices, tags: Tags) -> ValueId:
        if (total, here) not in self.transfers:
            there = arrived(total[0], here)
            self.values[there] = self.dag.values[total[0]]
            self.transfers[total, here] = Transfer(
                id=transfer_id(there), tags=tags, reads=(total,), writes=(there,),
                source=source, devices=here, stream=self.stream(total[0]),
            )  # fmt: skip
        return self.transfers[total, here].writes[0]

    def stream(self, value: ValueId) -> str:
        maker = self.dag.nodes[self.dag.producers[value]]
        if isinstance(maker, Redistribute):
            return maker.onward
        return (maker.stream or "pp") if isinstance(maker, Compute) else WEIGHTS_STREAM

    def weight_copy(self, value: ValueId, here: Devices) -> ValueId:
        """A parameter that is used away from its home has a copy there, refreshed after updates."""
        if self.homes[value] == here:
            return value
        copy = arrived(value, here)
        self.values[copy] = replace(self.dag.values[value], copy=True)
        self.copies[value, here] = copy
        return copy


def weight_copies(dag: Dag, rewrite: Transfers) -> list[Node]:
    """After an update, the new parameters go to every copy."""
    made: list[Node] = []
    for (value, here), copy in rewrite.copies.items():
        new = updated(value)
        if new in dag.producers:
            there = updated(copy)
            rewrite.values[there] = replace(dag.values[new], copy=True, state=copy)
            made.append(
                Transfer(
                    id=transfer_id(there),
                    reads=((new,),),
                    writes=(there,),
                    source=rewrite.homes[value],
                    devices=here,
                    stream=WEIGHTS_STREAM,
                )  # fmt: skip
            )
    return made
