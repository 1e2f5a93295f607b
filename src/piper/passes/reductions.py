"""Reduce gradients over replicas, between backward and update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from piper.ir.dag import Dag
from piper.ir.flat_layout import Message, in_type, messages, shard_specs
from piper.ir.maker import Maker
from piper.ir.naming import (
    TOTALS,
    collective_id,
    gradient_shard,
    gradient_sum,
    updated,
    weights,
    whole_weights,
)
from piper.ir.nodes import Collective, Compute, Kind, Node, Precedence, Sum, Totals, Update
from piper.ir.placement.replicas import distinct
from piper.ir.placement.residency import Residency
from piper.ir.values import Role, TensorSpec, Value
from piper.names import BucketId, ValueId
from piper.passes.bucket_homes import Devices, bucket_homes

FIRST_UPDATES = Maker("updates do not wait")


def place_reductions(dag: Dag) -> Dag:
    """Replicas reduce their gradients. Sharded parameters are gathered before use.

    rewrite:
        B@0, B@1 -> Update                                       on devices [0, 2]
        -->
        B@0, B@1 -> all-reduce -> Update                         zero=0
        gather -> F, B;  B@0, B@1 -> reduce-scatter -> Update    zero=1: updates a shard
        B@0 -> reduce-scatter -> Update                          zero=2: as gradients come
        B@1 -> reduce-scatter -/                                 zero=3: gathers come later,
                                                                 and it may reduce as zero=1 does
    """
    if not dag.residencies:
        return dag
    reductions = Reductions(dag)
    reduced = {node.id: reductions.reduced(node) for node in updates(dag)}
    read = {dag.nodes[name].reads[0]: node.reads[0] for name, node in reduced.items()}
    reductions.shard_states()
    nodes = [reductions.rewired(reduced.get(node.id, node), read) for node in dag.nodes.values()]
    after = dag.with_values(reductions.values).with_nodes((*nodes, *reductions.made))
    after = after.known_to(replace(after, residencies=reductions.residencies))
    return after.with_precedences(updates_before_totals(after))


def updates(dag: Dag) -> list[Update]:
    return [node for node in dag.nodes.values() if isinstance(node, Update)]


def updates_before_totals(dag: Dag) -> Iterator[Precedence]:
    """Updates start first, unless they clip: nothing waits for the norm then."""
    steps = updates(dag)
    if steps and not any((TOTALS,) in step.reads for step in steps):
        totals = [node.id for node in dag.nodes.values() if isinstance(node, Totals)]
        yield Precedence(tuple(step.id for step in steps), tuple(totals), FIRST_UPDATES)


@dataclass
class Reductions:
    """The state of the pass: the collectives and values so far."""

    dag: Dag
    made: list[Collective] = field(default_factory=list)
    values: dict[ValueId, Value] = field(default_factory=dict)
    whole: dict[ValueId, ValueId] = field(default_factory=dict)  # sharded state -> gathered
    residencies: dict[BucketId, Residency] = field(default_factory=dict)  # the final ones

    def __post_init__(self) -> None:
        self.homes = bucket_homes(self.dag)

    def layout(self, bucket: BucketId) -> tuple[Message, ...]:
        how = self.dag.residencies[bucket]
        return messages(self.dag.held(bucket), how.message_bytes, how.ways)

    def gradient_layout(self, bucket: BucketId) -> tuple[Message, ...]:
        """The same messages as those of the parameters, so that shards hold the same elements."""
        return in_type(self.layout(bucket), self.dag.model.buckets[bucket].gradient)

    def reduced(self, update: Update) -> Update:
        """The update, which now reads the reduced gradient."""
        bucket = update.bucket
        how = self.dag.residencies.get(bucket)
        if how is None or len(how.devices) == 1:
            return update
        total, home = update.reads[0], self.homes[bucket]
        if how.sharded:
            total = tuple(
                self.scattered(bucket, how, part) for part in self.parts(total, how, home)
            )
        if len(how.across[0]) > 1:
            total = (self.summed(bucket, how, total),)
        return replace(update, reads=(total, *update.reads[1:]))

    def parts(self, total: Sum, how: Residency, home: Devices) -> list[Sum]:
        """The parts that are scattered at once: all, or the gradients of each microbatch."""
        if how.once:
            return [total]
        found: dict[tuple[Devices | None, int | None], list[ValueId]] = {}
        for value in total:
            maker = self.dag.nodes[self.dag.producers[value]]
            assert isinstance(maker, Compute)
            here = is_on(maker, home)  # otherwise they are added up before they are sent
            found.setdefault((maker.devices, maker.microbatch if here else None), []).append(value)
        return [tuple(values) for values in found.values()]

    def scattered(self, bucket: BucketId, how: Residency, total: Sum) -> ValueId:
        layout = self.gradient_layout(bucket)
        maker = self.dag.nodes[self.dag.producers[total[0]]]
        assert isinstance(maker, Compute)
        name = gradient_shard(bucket, maker.region, maker.microbatch)
        self.values[name] = gradient(shard_specs(layout, how.ways), Role.GRADIENT_SHARD, bucket)
        self.made.append(
            Collective(
                id=collective_id(Kind.REDUCE_SCATTER, name),
                kind=Kind.REDUCE_SCATTER,
                reads=(total,),
                writes=(name,),
                devices=self.homes[bucket],
                groups=how.groups,
                stream=how.reduce_stream,
                messages=layout,
            )  # fmt: skip
        )
        return name

    def summed(self, bucket: BucketId, how: Residency, total: Sum) -> ValueId:
        specs = self.dag.held_gradients(bucket)
        if how.sharded:
            specs = shard_specs(self.gradient_layout(bucket), how.ways)
        name = gradient_sum(bucket)
        self.values[name] = gradient(specs, Role.GRADIENT_SUM, bucket)
        self.made.append(
            Collective(
                id=collective_id(Kind.ALL_REDUCE, name),
                kind=Kind.ALL_REDUCE,
                reads=(total,),
                writes=(name,),
                devices=self.homes[bucket],
                groups=how.across,
                stream=how.reduce_stream,
                messages=messages(specs, how.message_bytes, 1),
            )  # fmt: skip
        )
        return name

    def shard_states(self) -> None:
        """Gather sharded parameters once per step, or (zero=3) wherever they are used.

        Frozen parameters are sharded with zero=3 only, buffers never.
        """
        for bucket, how in self.dag.residencies.items():
            known = self.dag.model.buckets[bucket]
            shardable = not known.buffers and (known.trainable or how.zero == 3)
            self.residencies[bucket] = how if shardable else replace(how, zero=0)
            if self.residencies[bucket].sharded:
                shard, state = shard_specs(self.layout(bucket), how.ways), weights(bucket)
                for name in (state, updated(state)):
                    self.values[name] = replace(self.dag.values[name], specs=shard)
                if how.zero < 3 or self.is_used_elsewhere(bucket):
                    self.gathered(bucket, how)

    def is_used_elsewhere(self, bucket: BucketId) -> bool:
        readers = map(self.dag.nodes.__getitem__, self.dag.consumers.get(weights(bucket), ()))
        return any(not is_on(node, self.homes[bucket]) for node in readers)

    def gathered(self, bucket: BucketId, how: Residency) -> None:
        gather, whole = gather_of(self.dag, bucket, how)
        self.whole[weights(bucket)] = gather.writes[0]
        self.values[gather.writes[0]] = whole
        self.made.append(replace(gather, devices=self.homes[bucket]))

    def rewired(self, node: Node, read: dict[Sum, Sum]) -> Node:
        """Computes read gathered parameters. The norm is over the gradients that updates read."""
        if isinstance(node, Totals):
            return replace(node, reads=(node.reads[0], *(read[t] for t in node.reads[1:])))
        if not isinstance(node, Compute) or not any(t[0] in self.whole for t in node.reads):
            return node
        return replace(node, reads=tuple(self.readable(node, total) for total in node.reads))

    def readable(self, node: Compute, total: Sum) -> Sum:
        if total[0] not in self.whole:
            return total
        bucket = self.dag.values[total[0]].bucket
        assert bucket is not None
        here = is_on(node, self.homes[bucket])
        if here and self.dag.residencies[bucket].zero == 3:
            return total
        return (self.whole[total[0]],)


def is_on(node: Node, home: Devices) -> bool:
    """Whether a node runs on the devices that hold a bucket."""
    return node.devices is home or distinct(node.devices or ()) == home


def gradient(specs: tuple[TensorSpec, ...], role: Role, bucket: BucketId) -> Value:
    return Value(specs, role, bundle=True, bucket=bucket)


def gather_of(
    dag: Dag, bucket: BucketId, how: Residency, number: int | None = None
) -> tuple[Collective, Value]:
    """The all-gather of a bucket, and its result."""
    specs, name = dag.held(bucket), whole_weights(bucket, number)
    node = Collective(
        id=collective_id(Kind.ALL_GATHER, name), kind=Kind.ALL_GATHER, reads=((weights(bucket),),),
        writes=(name,), devices=how.devices, groups=how.groups, stream=how.gather_stream,
        messages=messages(specs, how.message_bytes, how.ways),
    )  # fmt: skip
    return node, Value(specs, Role.WHOLE_WEIGHTS, bundle=True, bucket=bucket)
