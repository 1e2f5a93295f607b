"""Messages and updates by their tags: what the filters of an order select besides passes.

Updates, reductions and gathers have the tags of the regions that use their parameters. All other
messages have those of their pass: SEND those of the sender, RECV those of the receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import assert_never

from piper.ir.dag import Dag, matching
from piper.ir.filters import Filter, Tag, fits
from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Kind,
    Node,
    Redistribute,
    Store,
    Totals,
    Transfer,
    Update,
    Way,
)
from piper.ir.values import Role
from piper.names import OF, PASS, RUN, B, BucketId, F, NodeId, Operation, RegionId

TagTable = dict[str, Tag]
Key = tuple[Tag, ...]


class TagIndex:
    """Nodes with their tags, found by the values of any keys."""

    def __init__(self, entries: Iterable[tuple[NodeId, TagTable]]) -> None:
        self.entries = list(entries)
        self.groups: dict[tuple[str, ...], dict[Key, list[NodeId]]] = {}

    def select(self, wanted: Filter) -> list[NodeId]:
        """The nodes that a filter means, in the DAG's order."""
        if type(wanted) is not Filter:
            return list(dict.fromkeys(name for name, tags in self.entries if fits(wanted, tags)))
        groups, exact = self.by(wanted.keys), tuple(value for _, value in wanted.items)
        if exact in groups:  # no key of a group is "*" or several values
            return groups[exact]  # type: ignore[index]
        found = set(chain.from_iterable(groups[key] for key in matching(groups, exact)))
        return list(dict.fromkeys(name for name, _ in self.entries if name in found))

    def by(self, keys: tuple[str, ...]) -> Mapping[Key, list[NodeId]]:
        if keys not in self.groups:
            found: dict[Key, dict[NodeId, None]] = {}
            for name, tags in self.entries:
                found.setdefault(tuple(tags.get(key) for key in keys), {})[name] = None
            self.groups[keys] = {key: list(names) for key, names in found.items()}
        return self.groups[keys]


def operation_index(dag: Dag, uses: Mapping[NodeId, Compute] | None = None) -> TagIndex:
    """Every message and update. `uses`: the pass that a gather with zero=3 is made for."""
    users, known = bucket_users(dag), uses or {}
    made = ((name, use_table(dag, use)) for name, use in known.items())
    others = (node for node in dag.nodes.values() if node.id not in known)
    tables = ((node.id, tags) for node in others for tags in tag_tables(dag, node, users))
    return TagIndex(chain(tables, made))


def use_index(dag: Dag, passes: Iterable[Compute]) -> TagIndex:
    """Passes by the tags that a gather for them would have."""
    return TagIndex((use.id, use_table(dag, use)) for use in passes)


def bucket_users(dag: Dag) -> dict[BucketId, list[RegionId]]:
    found: dict[BucketId, list[RegionId]] = {}
    for region in dag.model.regions:
        for bucket in region.buckets:
            found.setdefault(bucket, []).append(region.id)
    return found


def tag_tables(
    dag: Dag, node: Node, users: Mapping[BucketId, list[RegionId]]
) -> Iterator[TagTable]:
    """The tags of a node. Parameters that several regions use have those of each."""
    match node:
        case Compute() | Redistribute() | Store() | Fetch() | Totals():
            return
        case Update():
            yield from bucket_tables(dag, users[node.bucket], Operation.UPDATE)
        case Collective(kind=Kind.ALL_GATHER):
            yield from bucket_tables(dag, users[bucket_of(dag, node)], Operation.GATHER)
        case Collective():
            shared = common(map(dict, (one.tags for one in makers(dag, node))))
            yield from bucket_tables(
                dag, users[bucket_of(dag, node)], Operation.REDUCE, split_tags(dag, shared)
            )
        case Exchange():
            yield exchange_table(dag, node)
        case Transfer():
            yield from transfer_tables(dag, node)
        case _:
            assert_never(node)


def bucket_tables(
    dag: Dag, regions: Iterable[RegionId], what: Operation, more: Mapping[str, Tag] | None = None
) -> Iterator[TagTable]:
    for region in regions:
        yield {**region_tags(dag, region), **(more or {}), PASS: str(what)}


def use_table(dag: Dag, use: Compute) -> TagTable:
    """The tags of a gather that is made for this pass."""
    tags = {**region_tags(dag, use.region), **dict(use.tags)}
    return {**tags, OF: direction(use), PASS: str(Operation.GATHER)}


def exchange_table(dag: Dag, node: Exchange) -> TagTable:
    back = node.way is Way.BACK
    near = makers(dag, node) if back else readers(dag, node)
    what = Operation.COMBINE if back else Operation.DISPATCH
    tags = {**region_tags(dag, near[0].region), **dict(node.tags)}
    return {**tags, OF: direction(near[0]), PASS: str(what)}


def transfer_tables(dag: Dag, node: Transfer) -> Iterator[TagTable]:
    """Copies of parameters follow their update: no order needs to name them."""
    sources = makers(dag, node)
    if not sources or len(sources) < len(node.reads[0]):
        return
    ways = {direction(one) for one in sources}
    more: TagTable = {OF: ways.pop()} if len(ways) == 1 else {}
    tables = [{**region_tags(dag, one.region), **dict(one.tags)} for one in sources]
    yield {**common(tables), **more, PASS: str(Operation.SEND)}
    yield {RUN: 0, **dict(node.tags), **more, PASS: str(Operation.RECV)}


def makers(dag: Dag, node: Node) -> list[Compute | Redistribute]:
    """The passes that make what a message brings."""
    read = chain.from_iterable(node.reads)
    found = (dag.nodes[dag.producers[value]] for value in read if value in dag.producers)
    return [one for one in found if isinstance(one, Compute | Redistribute)]


def readers(dag: Dag, node: Node) -> list[Compute | Redistribute]:
    names = chain.from_iterable(dag.consumers.get(value, ()) for value in node.writes)
    nodes = map(dag.nodes.__getitem__, names)
    return [one for one in nodes if isinstance(one, Compute | Redistribute)]


def region_tags(dag: Dag, name: RegionId) -> TagTable:
    region = dag.model.by_id[name]
    return {RUN: region.run, **dict(region.tags)}


def common(tables: Iterable[Mapping[str, Tag]]) -> TagTable:
    """The tags that all of these have: gradients of several microbatches are of none."""
    first, *others = [dict(table) for table in tables] or [{}]
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}


def split_tags(dag: Dag, tags: Mapping[str, Tag]) -> TagTable:
    return {name: tags[name] for name, _ in dag.dimensions if name in tags}


def direction(node: Compute | Redistribute) -> str:
    return str(F if node.phase is F else B)


def bucket_of(dag: Dag, node: Collective) -> BucketId:
    bucket = dag.values[node.writes[0]].bucket
    assert bucket is not None and dag.values[node.writes[0]].role in BUCKET_ROLES
    return bucket


BUCKET_ROLES = (Role.GRADIENT_SHARD, Role.GRADIENT_SUM, Role.WHOLE_WEIGHTS)
