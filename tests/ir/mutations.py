"""DAGs with one mutation of what a node reads or writes, or of a field of a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from piper.ir.dag import Dag
from piper.ir.naming import weights
from piper.ir.nodes import Collective, Compute, Fetch, Node, Store, Sum, Transfer, Update
from piper.ir.values import Role, TensorSpec, Value
from piper.names import NodeId, ValueId
from piper.passes.bucket_homes import bucket_homes

Where = tuple[Node, int, int]  # a node, which of its reads, which part of that


@dataclass(frozen=True)
class Sites:
    """What mutations can change in one DAG."""

    dag: Dag
    gathered: bool = False  # every use of sharded parameters has its gather

    @cached_property
    def reads(self) -> list[Where]:
        return [
            (node, k, j)
            for node in self.dag.nodes.values()
            for k, total in enumerate(node.reads)
            for j in range(len(total))
        ]

    @cached_property
    def readable(self) -> list[ValueId]:
        """Everything that some node reads or writes."""
        read = (value for node in self.dag.nodes.values() for t in node.reads for value in t)
        return list(dict.fromkeys((*self.dag.producers, *read)))

    @cached_property
    def roots(self) -> dict[ValueId, object]:
        """What a value is a copy of: two with one root hold the same numbers."""
        return {value: self.root(value) for value in self.readable}

    @cached_property
    def by_root(self) -> dict[tuple[object, ...], list[ValueId]]:
        """Values that differ in their microbatch only."""
        found: dict[tuple[object, ...], list[ValueId]] = {}
        for value in self.readable:
            found.setdefault(kind(self.dag.values[value]), []).append(value)
        return found

    def root(self, value: ValueId) -> object:
        known, maker = self.dag.values[value], self.dag.producers.get(value)
        if known.role in (Role.WEIGHTS, Role.WHOLE_WEIGHTS):
            return known.bucket
        node = self.dag.nodes[maker] if maker else None
        if isinstance(node, Transfer | Store | Fetch) and len(node.reads[0]) == 1:
            return self.root(node.reads[0][0])
        return value

    def differ(self, one: Sum, other: Sum) -> bool:
        return sorted(map(str, map(self.roots.get, one))) != sorted(
            map(str, map(self.roots.get, other))
        )


def kind(value: Value) -> tuple[object, ...]:
    return value.role, value.index, value.base, value.region, value.bucket, value.experts


def with_reads(dag: Dag, node: Node, reads: tuple[Sum, ...]) -> Dag:
    return dag.with_nodes([replace(node, reads=reads)])


def with_part(dag: Dag, place: Where, *parts: ValueId) -> Dag:
    """Other parts in the place of one part of a sum."""
    node, k, j = place
    total = (*node.reads[k][:j], *parts, *node.reads[k][j + 1 :])
    return with_reads(dag, node, (*node.reads[:k], total, *node.reads[k + 1 :]))


def drop_a_read(sites: Sites, random: Random) -> Dag | None:
    """Without its totals, the only update there is would be one of a step that does not clip."""
    node, k, _ = random.choice(sites.reads)
    steps = sum(isinstance(other, Update) for other in sites.dag.nodes.values())
    if isinstance(node, Update) and k == 1 and steps == 1:
        return None
    return with_reads(sites.dag, node, (*node.reads[:k], *node.reads[k + 1 :]))


def double_a_read(sites: Sites, random: Random) -> Dag:
    node, k, _ = random.choice(sites.reads)
    return with_reads(sites.dag, node, (*node.reads[:k], node.reads[k], *node.reads[k:]))


def swap_two_reads(sites: Sites, random: Random) -> Dag | None:
    node, k, _ = random.choice(sites.reads)
    other = random.randrange(len(node.reads))
    if not sites.differ(node.reads[k], node.reads[other]):
        return None
    reads = list(node.reads)
    reads[k], reads[other] = reads[other], reads[k]
    return with_reads(sites.dag, node, tuple(reads))


def swap_two_writes(sites: Sites, random: Random) -> Dag | None:
    node = random.choice(list(sites.dag.nodes.values()))
    if len(node.writes) < 2:
        return None
    a, b = random.sample(range(len(node.writes)), 2)
    writes = list(node.writes)
    writes[a], writes[b] = writes[b], writes[a]
    return sites.dag.with_nodes([replace(node, writes=tuple(writes))])


def instead(
    sites: Sites, random: Random, wanted: Callable[[Value, Value], bool], alike: bool = False
) -> Dag | None:
    """A read of a value with another root, which goes with the right one as `wanted` says."""
    place = random.choice(sites.reads)
    right = place[0].reads[place[1]][place[2]]
    known = sites.dag.values
    choice = sites.by_root[kind(known[right])] if alike else sites.readable
    wrong = random.choice(choice)
    if not sites.differ((right,), (wrong,)) or not wanted(known[right], known[wrong]):
        return None
    return with_part(sites.dag, place, wrong)


def read_another_microbatch(sites: Sites, random: Random) -> Dag | None:
    return instead(sites, random, lambda right, wrong: right.role is not Role.TOTALS, alike=True)


def read_anything_else(sites: Sites, random: Random) -> Dag | None:
    return instead(sites, random, lambda right, wrong: True)


def read_another_region(sites: Sites, random: Random) -> Dag | None:
    """Of the same kind and size, so that nothing but its meaning tells."""
    return instead(sites, random, lambda a, b: (a.role, a.specs) == (b.role, b.specs))


def read_another_bucket(sites: Sites, random: Random) -> Dag | None:
    roles = (Role.WEIGHTS, Role.WHOLE_WEIGHTS)
    return instead(sites, random, lambda a, b: a.role in roles and b.role in roles)


def read_the_gradient_of_another_value(sites: Sites, random: Random) -> Dag | None:
    roles = (Role.GRADIENT, Role.SEED)
    return instead(
        sites, random, lambda a, b: a.role in roles and b.role in roles and a.base != b.base
    )


def lose_a_part_of_a_sum(sites: Sites, random: Random) -> Dag | None:
    place = random.choice(sites.reads)
    return with_part(sites.dag, place) if len(place[0].reads[place[1]]) > 1 else None


def count_a_part_twice(sites: Sites, random: Random) -> Dag:
    place = random.choice(sites.reads)
    value = place[0].reads[place[1]][place[2]]
    return with_part(sites.dag, place, value, value)


def mistake_the_size(sites: Sites, random: Random) -> Dag:
    value = random.choice(sites.readable)
    known = sites.dag.values[value]
    wrong: tuple[TensorSpec, ...] = (*known.specs, TensorSpec((7,)))
    if known.specs and random.random() < 0.7:
        k, spec = random.choice(list(enumerate(known.specs)))
        larger, other = replace(spec, shape=(*spec.shape, 2)), replace(spec, dtype="int8")
        wrong = (*known.specs[:k], random.choice([larger, other]), *known.specs[k + 1 :])
    return sites.dag.with_values({value: replace(known, specs=wrong)})


def read_what_is_at_home(sites: Sites, random: Random) -> Dag | None:
    """A region of experts reads the rows of its own device, or another one those at the experts."""
    return instead(
        sites,
        random,
        lambda a, b: (a.role, a.base) == (b.role, b.base) and a.experts != b.experts,
    )


def mistake_the_messages(sites: Sites, random: Random) -> Dag | None:
    node = random.choice(list(sites.dag.nodes.values()))
    if not isinstance(node, Collective):
        return None
    first, *rest = node.messages
    longer = replace(first, numel=first.numel + 1)
    twice = replace(first, tensors=(*first.tensors, first.tensors[0]))
    wrong = random.choice([rest, [longer, *rest], [twice, *rest], [first, *node.messages]])
    return sites.dag.with_nodes([replace(node, messages=tuple(wrong))])


def mistake_the_shards(sites: Sites, random: Random) -> Dag | None:
    """All shards of a bucket are of one size, but of a wrong one."""
    cut = [v for v in sites.readable if sites.dag.values[v].role is Role.GRADIENT_SHARD]
    if not cut:
        return None
    right = sites.dag.values[random.choice(cut)]
    wrong = tuple(replace(spec, shape=((spec.shape[0] or 0) + 1,)) for spec in right.specs)
    alike = [
        (name, value)
        for name, value in sites.dag.values.items()
        if value.bucket == right.bucket and value.specs == right.specs
    ]
    return sites.dag.with_values({name: replace(value, specs=wrong) for name, value in alike})


def read_a_shard(sites: Sites, random: Random) -> Dag | None:
    """A region that finds its parameters gathered reads what its device has of them instead.

    With zero=3 that is right until there are gathers, where the parameters are at home.
    """
    place = random.choice(sites.reads)
    node, right = place[0], sites.dag.values[place[0].reads[place[1]][place[2]]]
    if right.role is not Role.WHOLE_WEIGHTS or not isinstance(node, Compute) or not right.bucket:
        return None
    how, homes = sites.dag.residencies[right.bucket], bucket_homes(sites.dag)
    if how.zero == 3 and not sites.gathered and node.devices == homes[right.bucket]:
        return None
    return with_part(sites.dag, place, weights(right.bucket))


KINDS: tuple[Callable[[Sites, Random], Dag | None], ...] = (
    drop_a_read, double_a_read, swap_two_reads, swap_two_writes, read_another_microbatch,
    read_anything_else, read_another_region, read_another_bucket,
    read_the_gradient_of_another_value, lose_a_part_of_a_sum, count_a_part_twice,
    mistake_the_size, mistake_the_shards, mistake_the_messages, read_a_shard,
    read_what_is_at_home,
)  # fmt: skip


def changed(before: Dag, after: Dag) -> list[NodeId | ValueId]:
    """Which node, or which value, is not what it was."""
    nodes = [name for name, node in after.nodes.items() if before.nodes[name] is not node]
    values = [name for name, value in after.values.items() if before.values[name] is not value]
    return [*nodes, *values]
