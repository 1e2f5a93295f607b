"""Fetch offloaded parameters before each use, and store them after their update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from piper.ir.dag import Dag
from piper.ir.host_copies import HostCopies, Offloaded
from piper.ir.naming import fetch_id, fetched, store_id, updated, weights
from piper.ir.nodes import Collective, Compute, Fetch, Node, Store, Update
from piper.ir.values import Role, Value
from piper.names import BucketId, NodeId, ValueId
from piper.passes.bucket_homes import bucket_homes
from piper.passes.buffer_slots import BufferSlots
from piper.passes.gathers import is_gather, rewired
from piper.passes.host_copies import around

Reader = Compute | Collective | Update


def offload_parameters(dag: Dag) -> Dag:
    """The DAG with parameters in host memory, which passes, gathers and updates fetch.

    What is still on the device is not fetched again. A shard is gathered from what was fetched.

    rewrite:
        F -> B -> Update                     Offload(where(PP=0), "parameters"), one buffer
        -->
        fetch -> F, fetch -> B -> Update -> store

        gather -> F                          the same with zero=3
        -->
        fetch -> gather -> F
    """
    moved = offloaded_buckets(dag)
    if not moved:
        return dag
    rewrite = Rewrite(dag, moved)
    for readers in lane_readers(dag):
        for how in dict.fromkeys(moved.values()):
            LaneFetches(rewrite, readers, how).place()
    return rewrite.done()


def lane_readers(dag: Dag) -> Iterable[list[Reader]]:
    """The passes, updates and gathers of each lane, in order."""
    table, found = dag.lanes, dict[int, list[Reader]]()
    for node in map(dag.nodes.__getitem__, dag.sequence):
        if (isinstance(node, Compute | Update) or is_gather(node)) and node.devices:
            found.setdefault(table[node.devices], []).append(node)
    return found.values()


def offloaded_buckets(dag: Dag) -> dict[BucketId, HostCopies]:
    """Buffers stay on the device, and so do parameters of which a device reads a copy at home."""
    wanted = {
        bucket: how
        for bucket, user in dag.model.first_uses.items()
        if (how := dag.offloads.get((Offloaded.PARAMETERS, user)))
        and not dag.model.buckets[bucket].buffers
    }
    kept = copied_at_home(dag) if wanted else ()
    return {bucket: how for bucket, how in wanted.items() if bucket not in kept}


def copied_at_home(dag: Dag) -> set[BucketId]:
    """Buckets with a copy for replicas of which some run where the bucket is at home."""
    homes = bucket_homes(dag)
    reads = ((node, dag.values[total[0]].copy_of) for node in dag.computes for total in node.reads)
    return {
        bucket
        for node, bucket in reads
        if bucket and not set(node.devices or ()).isdisjoint(homes[bucket])
    }


class Rewrite:
    """What the pass has made so far."""

    def __init__(self, dag: Dag, moved: dict[BucketId, HostCopies]) -> None:
        self.dag, self.moved, self.homes = dag, moved, bucket_homes(dag)
        self.made: list[Node] = []
        self.values: dict[ValueId, Value] = {}
        self.reads: dict[NodeId, dict[ValueId, ValueId]] = {}  # by reader: what it reads instead
        self.ahead: dict[NodeId, list[NodeId]] = {}
        self.behind: dict[NodeId, list[NodeId]] = {}
        self.counts: dict[BucketId, int] = {}  # fetches so far
        for name in map(weights, moved):
            for value in (name, updated(name)):
                if value in dag.values:
                    self.values[value] = replace(dag.values[value], host=True)

    def fetch(self, bucket: BucketId, how: HostCopies, before: NodeId) -> ValueId:
        there, number = weights(bucket), self.counts.get(bucket, 0)
        here = fetched(there, number)
        self.counts[bucket] = number + 1
        self.values[here] = self.dag.values[there]
        node = Fetch(
            id=fetch_id(here), reads=((there,),), writes=(here,), devices=self.homes[bucket],
            stream=how.stream,
        )  # fmt: skip
        self.made.append(node)
        self.ahead.setdefault(before, []).append(node.id)
        return here

    def update(self, node: Update, here: ValueId, how: HostCopies) -> None:
        """It changes what was fetched, which then replaces what is in host memory."""
        (old, *others), new = node.writes, updated(here)
        self.values[new] = replace(self.dag.values[old], state=here)
        clip = sum(self.dag.values[total[0]].role is Role.TOTALS for total in node.reads)
        reads = (*node.reads[: 1 + clip], (here,), *node.reads[1 + clip :])
        store = Store(
            id=store_id(new), reads=((new,),), writes=(old,), devices=node.devices or (),
            stream=how.stream, lag=how.buffers - 1,
        )  # fmt: skip
        self.made += [replace(node, reads=reads, writes=(new, *others)), store]
        self.behind.setdefault(node.id, []).append(store.id)
        for reader in map(self.dag.nodes.__getitem__, self.dag.consumers.get(old, ())):
            self.reads.setdefault(reader.id, {})[old] = new  # sent to copies elsewhere

    def done(self) -> Dag:
        nodes = [rewired(self.dag.nodes[name], changed) for name, changed in self.reads.items()]
        wider = self.dag.with_values(self.values).with_nodes([*nodes, *self.made])
        return replace(wider, sequence=tuple(around(self.dag, self.ahead, self.behind)))


@dataclass
class Need:
    """A bucket that is read for a pass, by the pass itself or by gathers for it and later ones."""

    readers: list[Reader] = field(default_factory=list)
    until: int = 0  # the last pass by which it has been read


class LaneFetches:
    """The fetches of the buckets that are copied in one way, on one lane."""

    def __init__(self, rewrite: Rewrite, readers: list[Reader], how: HostCopies) -> None:
        self.rewrite, self.how, self.dag = rewrite, how, rewrite.dag
        self.order = [node for node in readers if not isinstance(node, Collective)]
        self.position = {node.id: k for k, node in enumerate(self.order)}
        self.needs: list[dict[BucketId, Need]] = [{} for _ in self.order]
        position = 0  # of the pass that is next
        for node in readers:
            for bucket in self.read_by(node):
                need = self.needs[position].setdefault(bucket, Need())
                need.readers.append(node)
                need.until = max(need.until, self.read_until(position, node))
            position += not isinstance(node, Collective)

    def is_mine(self, bucket: BucketId) -> bool:
        return self.rewrite.moved.get(bucket) == self.how

    def read_by(self, node: Reader) -> Iterator[BucketId]:
        if isinstance(node, Update):
            found = [node.bucket]
        else:
            known = [self.dag.values[total[0]] for total in node.reads]
            found = [
                one.bucket
                for one in known
                if one.role is Role.WEIGHTS and one.bucket and not one.copy
            ]
        yield from (bucket for bucket in found if self.is_mine(bucket))

    def read_until(self, position: int, node: Reader) -> int:
        """A gather has read its shards when the first pass uses its result."""
        if not isinstance(node, Collective):
            return position
        readers = self.dag.consumers.get(node.writes[0], ())
        here = (self.position[name] for name in readers if name in self.position)
        return min(here, default=position)

    def place(self) -> None:
        size = self.how.buffers * max(map(len, self.needs), default=0)
        slots = BufferSlots(size, self.how.ahead, [list(needs) for needs in self.needs])
        latest: dict[BucketId, ValueId] = {}
        for position, needs in enumerate(self.needs):
            for bucket, need in needs.items():
                if bucket not in slots.inside:
                    latest[bucket] = self.fetch(slots, position, bucket, need)
                slots.free_from[slots.inside[bucket]] = need.until + 1
                for reader in need.readers:
                    self.read(reader, bucket, latest[bucket])

    def fetch(self, slots: BufferSlots, position: int, bucket: BucketId, need: Need) -> ValueId:
        """Ahead of its first reader, once the copies of enough other buckets are freed."""
        slot = slots.take(position, bucket, keep=self.needs[position])
        assert slot is not None, "there are slots for all that a pass reads"
        start = slots.start(position, slot)
        before = self.order[start].id if start < position else need.readers[0].id
        return self.rewrite.fetch(bucket, self.how, before)

    def read(self, reader: Reader, bucket: BucketId, here: ValueId) -> None:
        if isinstance(reader, Update):
            self.rewrite.update(reader, here, self.how)
        else:
            self.rewrite.reads.setdefault(reader.id, {})[weights(bucket)] = here
