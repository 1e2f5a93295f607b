"""Token all-to-all: dispatch before every pass of an expert-sharded region, combine after it."""

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

ALL_TO_ALL = Maker("token all-to-all")


def insert_token_all_to_all(dag: Dag) -> Dag:
    """Tokens are dispatched to their experts before a sharded region, and combined after it.

    rewrite:
        tokens, counts -> F -> tokens;  token grads -> B -> token grads
        -->
        tokens, counts -> dispatch -> F -> combine -> tokens      counts are exchanged here, once
        token grads    -> dispatch -> B -> combine -> token grads
    """
    if not dag.shardings:
        return dag
    rewrite = TokenAllToAll(dag)
    nodes = {part.id: part for node in dag.nodes.values() for part in rewrite.parts(node)}
    makers = {name: dag.makers.get(name, ALL_TO_ALL) for name in nodes}
    residencies = {
        bucket: among_holders(how, sharding) if (sharding := expert_sharding(dag, bucket)) else how
        for bucket, how in dag.residencies.items()
    }
    values = {**dag.values, **rewrite.values, **dict(local_experts(dag))}
    return replace(dag, nodes=nodes, makers=makers, values=values, residencies=residencies)


def expert_sharding(dag: Dag, bucket: BucketId) -> Sharding | None:
    return sharding_of(dag.model, dag.shardings, bucket)


def local_experts(dag: Dag) -> Iterator[tuple[ValueId, Value]]:
    """Parameters and gradients, as large as a device's part of the experts."""
    held = {
        bucket: held_specs(dag.model, dag.shardings, bucket)
        for region in dag.shardings
        for bucket in dag.model.by_id[region].buckets
    }
    for name, value in dag.values.items():
        if value.bucket in held:
            whole = held[value.bucket]
            gradient = value.role is Role.WEIGHT_GRADIENT
            specs = dag.model.buckets[value.bucket].gradients(whole) if gradient else whole
            yield name, replace(value, specs=specs)


@dataclass
class TokenAllToAll:
    """The state of the pass: the values and expert contracts so far."""

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
        tokens = [node.reads[first + k] for k in found.rows]
        counts = node.reads[first + found.counts]
        remote = [*map(self.remote_name(region), tokens), self.counted(region, counts)]
        route = self.route(region, node)
        yield self.exchange(node, Way.COUNTED, "to", [*tokens, counts], [*remote, route])
        moved = dict(zip([*tokens, counts], remote, strict=True))
        yield from self.around(node, moved, len(region.outputs), route)

    def backward(self, node: Compute) -> Iterator[Node]:
        """BW reads the gradients that BI has dispatched."""
        region = self.dag.model.by_id[node.region]
        names = weight_reads(region) if node.phase is BW else backward_reads(region)
        found, route = self.contracts[region.id], self.route(region, node)
        remote_name = self.remote_name(region)
        moved: dict[Sum, ValueId] = {}
        grads: list[Sum] = []
        for name, total in zip(names, node.reads, strict=True):
            if name == (Argument.INPUT, found.counts):
                moved[total] = self.counted(region, total)
            elif name[0] in (Argument.INPUT, Argument.OUTPUT_GRAD):
                moved[total] = remote_name(total)
                grads += [total] if name[0] is Argument.OUTPUT_GRAD else []
        if node.phase is BW:
            yield replace(node, reads=tuple(renamed(node.reads, moved)))
            return
        yield self.exchange(node, Way.OUT, "to", [*grads, (route,)], [moved[g] for g in grads])
        yield from self.around(node, moved, len(region.input_grads), route)

    def around(
        self, node: Compute, moved: dict[Sum, ValueId], count: int, route: ValueId
    ) -> Iterator[Node]:
        """The node itself on the experts' devices. Its first `count` results are combined."""
        results, rest = node.writes[:count], node.writes[count:]
        remote = [self.named(value, at_experts(value), node.region) for value in results]
        yield replace(node, reads=tuple(renamed(node.reads, moved)), writes=(*remote, *rest))
        if results:
            reads = [*((value,) for value in remote), (route,)]
            yield self.exchange(node, Way.BACK, "from", reads, results)

    def exchange(
        self, node: Compute, way: Way, word: str, reads: Sequence[Sum], writes: Sequence[ValueId]
    ) -> Exchange:
        how = self.dag.shardings[node.region]
        assert node.devices is not None
        return Exchange(
            id=exchange_id(word, node.id), way=way, tags=node.tags, reads=tuple(reads),
            writes=tuple(writes), devices=node.devices, groups=how.groups, stream=how.stream,
        )  # fmt: skip

    def remote_name(self, region: Region) -> Callable[[Sum], ValueId]:
        """The name of a value on the devices of a region's experts."""
        return lambda total: self.named(total[0], at_experts(total[0], region.id), region.id)

    def named(self, value: ValueId, name: ValueId, region: RegionId) -> ValueId:
        """Its size is assumed to be unchanged: tokens are spread roughly evenly."""
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
        """How many tokens went to which device; the same for all passes of a microbatch."""
        name = route(region.id, node.microbatch)
        counts = TensorSpec((self.contracts[region.id].experts,), "int64")
        made = Value((counts, counts), Role.ROUTE, bundle=True, region=region.id)
        self.values[name] = self.same(made)
        return name


def renamed(reads: Sequence[Sum], moved: dict[Sum, ValueId]) -> Iterator[Sum]:
    return ((moved[total],) if total in moved else total for total in reads)
