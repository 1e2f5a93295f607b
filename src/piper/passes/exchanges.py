"""Bring rows to the devices of their experts and back, around every pass of a sharded region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.model import Region
from piper.ir.naming import at_experts, exchange_id, route
from piper.ir.nodes import Compute, Exchange, Node, Sum, Way
from piper.ir.sharding import (
    Contract,
    Sharding,
    among_holders,
    contract,
    held_specs,
    sharding_of,
    share_of,
)
from piper.ir.training import Argument, backward_reads, weight_reads
from piper.ir.values import Role, TensorSpec, Value
from piper.names import BW, BucketId, F, RegionId, ValueId

EXCHANGES = Maker("exchanges")


def insert_exchanges(dag: Dag) -> Dag:
    """Rows travel to their experts before a sharded region, and back behind it.

    rewrite:
        rows, counts -> F -> rows;  grads of rows -> B -> grads of rows
        -->
        rows, counts -> exchange -> F -> exchange -> rows              counts are exchanged once
        grads of rows -> exchange -> B -> exchange -> grads of rows
    """
    if not dag.shardings:
        return dag
    work = Work(dag)
    nodes = {part.id: part for node in dag.nodes.values() for part in work.parts(node)}
    makers = {name: dag.makers.get(name, EXCHANGES) for name in nodes}
    residencies = {
        bucket: among_holders(how, cut) if (cut := cut_of(dag, bucket)) else how
        for bucket, how in dag.residencies.items()
    }
    values = {**dag.values, **work.values, **dict(shares(dag))}
    return replace(dag, nodes=nodes, makers=makers, values=values, residencies=residencies)


def cut_of(dag: Dag, bucket: BucketId) -> Sharding | None:
    return sharding_of(dag.model, dag.shardings, bucket)


def shares(dag: Dag) -> Iterator[tuple[ValueId, Value]]:
    """Parameters and gradients as large as a device's share of the experts."""
    held = {
        bucket: held_specs(dag.model, dag.shardings, bucket)
        for region in dag.shardings
        for bucket in dag.model.by_id[region].buckets
    }
    for name, value in dag.values.items():
        if value.bucket in held:
            yield name, replace(value, specs=held[value.bucket])


@dataclass
class Work:
    """What one run of the pass has made so far."""

    dag: Dag
    values: dict[ValueId, Value] = field(default_factory=dict)
    contracts: dict[RegionId, Contract] = field(default_factory=dict)
    known: dict[Value, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for region in self.dag.shardings:
            found = contract(self.dag.model, self.dag.model.by_id[region])
            assert isinstance(found, Contract)
            self.contracts[region] = found

    def parts(self, node: Node) -> Iterator[Node]:
        if not isinstance(node, Compute) or node.region not in self.dag.shardings:
            yield node
        elif node.phase is F:
            yield from self.forward(node)
        else:
            yield from self.backward(node)

    def forward(self, node: Compute) -> Iterator[Node]:
        region = self.dag.model.by_id[node.region]
        found, first = self.contracts[region.id], len(region.buckets)
        rows = [node.reads[first + k] for k in found.rows]
        counts = node.reads[first + found.counts]
        away = [*map(self.away_of(region), rows), self.counted(region, counts)]
        route = self.route(region, node)
        yield self.exchange(node, Way.COUNTED, "to", [*rows, counts], [*away, route])
        moved = dict(zip([*rows, counts], away, strict=True))
        yield from self.around(node, moved, len(region.outputs), route)

    def backward(self, node: Compute) -> Iterator[Node]:
        """BW finds the gradients where BI brought them."""
        region = self.dag.model.by_id[node.region]
        names = weight_reads(region) if node.phase is BW else backward_reads(region)
        found, route = self.contracts[region.id], self.route(region, node)
        here = self.away_of(region)
        moved: dict[Sum, ValueId] = {}
        grads: list[Sum] = []
        for name, total in zip(names, node.reads, strict=True):
            if name == (Argument.INPUT, found.counts):
                moved[total] = self.counted(region, total)
            elif name[0] in (Argument.INPUT, Argument.OUTPUT_GRAD):
                moved[total] = here(total)
                grads += [total] if name[0] is Argument.OUTPUT_GRAD else []
        if node.phase is BW:
            yield replace(node, reads=tuple(renamed(node.reads, moved)))
            return
        yield self.exchange(node, Way.OUT, "to", [*grads, (route,)], [moved[g] for g in grads])
        yield from self.around(node, moved, len(region.input_grads), route)

    def around(
        self, node: Compute, moved: dict[Sum, ValueId], count: int, route: ValueId
    ) -> Iterator[Node]:
        """The node itself, at the experts; of what it writes, the first `count` go home."""
        homes, rest = node.writes[:count], node.writes[count:]
        away = [self.named(value, at_experts(value), node.region) for value in homes]
        yield replace(node, reads=tuple(renamed(node.reads, moved)), writes=(*away, *rest))
        if homes:
            reads = [*((value,) for value in away), (route,)]
            yield self.exchange(node, Way.BACK, "from", reads, homes)

    def exchange(
        self,
        node: Compute,
        way: Way,
        word: str,
        reads: Sequence[Sum],
        writes: Sequence[ValueId],
    ) -> Exchange:
        how = self.dag.shardings[node.region]
        assert node.devices is not None
        return Exchange(
            id=exchange_id(word, node.id), way=way, tags=node.tags, reads=tuple(reads),
            writes=tuple(writes), devices=node.devices, groups=how.groups, stream=how.stream,
        )  # fmt: skip

    def away_of(self, region: Region) -> Callable[[Sum], ValueId]:
        """How a value is called at the experts of a region."""
        return lambda total: self.named(total[0], at_experts(total[0], region.id), region.id)

    def named(self, value: ValueId, name: ValueId, region: RegionId) -> ValueId:
        """Expected to be as large as before: tokens are spread evenly, more or less."""
        known = self.dag.values[value]
        role = Role.ACTIVATION if known.is_given else known.role
        self.values[name] = self.same(
            Value(known.specs, role, base=known.base, region=known.region, experts=region)
        )
        return name

    def same(self, value: Value) -> Value:
        """What is equal is one object, for all microbatches."""
        return self.known.setdefault(value, value)

    def counted(self, region: Region, counts: Sum) -> ValueId:
        name = at_experts(counts[0], region.id)
        ways, known = self.dag.shardings[region.id].ways, self.dag.values[counts[0]]
        specs = (share_of(known.specs[0], ways),)
        self.values[name] = self.same(Value(specs, base=known.base, experts=region.id))
        return name

    def route(self, region: Region, node: Compute) -> ValueId:
        """How many rows went where; the same for all passes of a microbatch."""
        name = route(region.id, node.microbatch)
        counts = TensorSpec((self.contracts[region.id].experts,), "int64")
        made = Value((counts, counts), Role.ROUTE, bundle=True, region=region.id)
        self.values[name] = self.same(made)
        return name


def renamed(reads: Sequence[Sum], moved: dict[Sum, ValueId]) -> Iterator[Sum]:
    return ((moved[total],) if total in moved else total for total in reads)
