"""Rules about compute nodes: their reads and writes match the graph of their region."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from piper.errors import BUG, Problem
from piper.ir.dag import Dag
from piper.ir.flat_layout import messages, shard_specs
from piper.ir.model import Region
from piper.ir.nodes import Compute, Exchange, Redistribute, Sum
from piper.ir.placement.placements import Step
from piper.ir.placement.replicas import distinct
from piper.ir.sharding import Contract, contract, share_of
from piper.ir.training import Argument, Read, backward_reads, forward_reads, weight_reads
from piper.ir.values import LOADED, Role, TensorSpec, Value
from piper.names import BI, BW, B, BucketId, F, Phase, RegionId, ValueId, amount

Specs = tuple[TensorSpec, ...]
Meaning = tuple[Role, ValueId | None, RegionId | None, BucketId | None]


def meaning(value: Value) -> Meaning:
    """What a value stands for, regardless of its devices and sizes."""
    return value.role, value.base, value.region, value.bucket


def every_node_fits_its_region(dag: Dag) -> Iterator[Problem]:
    """Number, order, microbatch and sizes of reads and writes are those of the region's graph."""
    graphs = Graphs(dag)
    of, values_of = graphs.of, graphs.values
    for node in dag.computes:
        graph = of(node)
        values = values_of(node, graph)
        if values is None or values != graph.fitting:
            problems = list(graph.problems(dag, node))
            graph.fitting = graph.fitting if problems or values is None else values
            yield from problems


def parameters_are_whole_where_they_are_used(dag: Dag) -> Iterator[Problem]:
    """After the gathers pass, no region reads a shard."""
    cut = {bucket for bucket, how in dag.residencies.items() if how.sharded}
    if not cut:
        return
    for node in dag.computes:
        for (value, *_), (_, index) in zip(node.reads, reads_of(dag, node), strict=False):
            known = dag.values[value]
            if known.role is Role.WEIGHTS and known.bucket in cut:
                yield Problem(
                    f"{node.id} reads {value} as {Argument.BUCKET} {index} of {node.region}, "
                    f"which is a shard (expected all of {known.bucket}, gathered)",
                    BUG,
                )


def reads_of(dag: Dag, node: Compute) -> list[Read]:
    return READS[node.phase](dag.model.by_id[node.region])


READS = {F: forward_reads, B: backward_reads, BI: backward_reads, BW: weight_reads}


@dataclass(slots=True)
class Graph:
    """What a region reads and writes in one phase, in order."""

    reads: list[Wanted]
    writes: list[Wanted]
    loaded: list[int]  # reads that differ between microbatches
    fitting: list[Value] | None = None  # what the last correct node read and wrote

    def problems(self, dag: Dag, node: Compute) -> Iterator[Problem]:
        if len(self.reads) != len(node.reads):
            yield miscounted(node, "reads", len(node.reads), self.reads)
        elif len(self.writes) != len(node.writes):
            yield miscounted(node, "writes", len(node.writes), self.writes)
        else:
            for total, want in zip(node.reads, self.reads, strict=True):
                yield from want.misread(dag, node, total)
            for value, want in zip(node.writes, self.writes, strict=True):
                yield from want.miswritten(dag, node, value)


def miscounted(node: Compute, does: str, found: int, wanted: list[Wanted]) -> Problem:
    return Problem(
        f"{node.id} {does} {amount(found, 'value')} (expected {len(wanted)} in {node.phase} of "
        f"{node.region}: {', '.join(map(str, wanted)) or 'none'})",
        BUG,
    )


@dataclass(slots=True)
class Wanted:
    """One argument or result of a region's graph, and the values that it accepts."""

    name: str
    index: int | None
    parts: tuple[Meaning, ...]  # the parts of its sum; for parameters, the alternatives
    sizes: tuple[Specs, ...]  # the alternatives
    experts: RegionId | None = None
    shared: bool = False  # by all microbatches

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name} {self.index}"

    def misread(self, dag: Dag, node: Compute | Redistribute, total: Sum) -> Iterator[Problem]:
        fault = self.fault(dag, node, total)
        if fault:
            shown = " + ".join(total)
            yield Problem(f"{node.id} reads {shown} as {self} of {node.region}{fault}", BUG)

    def miswritten(
        self, dag: Dag, node: Compute | Redistribute, value: ValueId
    ) -> Iterator[Problem]:
        fault = "" if meaning(dag.values[value]) in self.parts else f" (expected {self.what})"
        fault = fault or self.misfit(dag.values[value])
        if fault:
            yield Problem(f"{node.id} writes {value} as {self} of {node.region}{fault}", BUG)

    def fault(self, dag: Dag, node: Compute | Redistribute, total: Sum) -> str:
        """Why this sum cannot be read here; empty if it can."""
        if self.shared:
            fine = len(total) == 1 and meaning(dag.values[total[0]]) in self.parts
            return "" if fine and self.fits(dag, total) else self.instead(dag, total, fine)
        sources = dag.origins.sources(total)
        found = {meaning(dag.values[value]) for value in sources}
        fine = len(sources) == len(self.parts) and found == set(self.parts)
        if fine and any(dag.origins.part(one) != (node.microbatch or 0) for one in sources):
            return f" (expected {self.what} of microbatch {node.microbatch})"
        return "" if fine and self.fits(dag, total) else self.instead(dag, total, fine)

    def fits(self, dag: Dag, total: Sum) -> bool:
        return not any(self.misfit(dag.values[value]) for value in total)

    def instead(self, dag: Dag, total: Sum, fine: bool) -> str:
        if not fine:
            return f" (expected {self.what})"
        return next(filter(None, (self.misfit(dag.values[value]) for value in total)))

    def misfit(self, value: Value) -> str:
        if value.specs not in self.sizes:
            return f", of {show(value.specs)} (expected {' or '.join(map(show, self.sizes))})"
        if value.experts != self.experts:
            at = f"at the experts of {self.experts}" if self.experts else "where its tokens are"
            return f", which is elsewhere (expected it {at})"
        return ""

    @property
    def what(self) -> str:
        """What is expected, in words."""
        role, base, region, bucket = self.parts[0]
        if role in (Role.SAVED, Role.CARRY):
            return f"what {region} keeps as {role}"
        if role in (Role.GRADIENT, Role.SEED):
            parts = ["the seed" if not part[2] else f"{part[2]}" for part in self.parts]
            return f"the gradient of {base} from {' and '.join(parts)}"
        if role is Role.WEIGHT_GRADIENT:
            return f"the gradient of the bucket {bucket} from {region}"
        return f"the bucket {bucket}" if bucket else f"{base}"


def show(specs: Specs) -> str:
    return f"({', '.join(map(str, specs))})"


class Graphs:
    """What the graph of each region reads and writes in each phase. Cached.

    Without experts and ZeRO, that depends on the model alone: all DAGs of it share what is known.
    """

    def __init__(self, dag: Dag) -> None:
        self.dag, self.model = dag, dag.model
        nodes = dag.nodes.values() if dag.shardings else ()
        self.exchanged = any(isinstance(node, Exchange) for node in nodes)
        computes = dag.computes if dag.residencies else ()
        self.converted = is_converted(dag)
        self.place = {node.region: distinct(node.devices or ()) for node in computes}
        alone = not (dag.shardings or dag.residencies)
        derived = dag.model.derived if alone else {}
        self.known: dict[tuple[RegionId, Phase], Graph]
        self.known = derived.setdefault((Graphs, self.converted), {})
        self.first: dict[tuple[Role, ValueId | None, int], Value] = {}
        self.every, self.origin = dag.values, dag.origins.microbatch.get

    def values(self, node: Compute, graph: Graph) -> list[Value] | None:
        """What a node reads and writes; None if some of it is a sum, or of another microbatch.

        Microbatches share values, so these are nearly always the objects that were already
        correct for an earlier microbatch.
        """
        known, part = self.every.__getitem__, node.microbatch or 0
        try:
            read = [value for (value,) in node.reads]
        except ValueError:
            return None
        parts = [*map(self.origin, read, repeat(part))]
        if len(read) != len(graph.reads) or parts.count(part) != len(parts):
            return None
        found = [*map(known, read), *map(known, node.writes)]
        for k in graph.loaded:
            own = found[k]
            if own.part != part:
                return None
            found[k] = self.first.setdefault((own.role, own.base, id(own.specs)), own)
        return found

    def of(self, node: Compute) -> Graph:
        key = node.region, node.phase
        found = self.known.get(key)
        if found is None:
            region = self.model.by_id[node.region]
            reads = [self.read(region, *one) for one in reads_of(self.dag, node)]
            loaded = [k for k, one in enumerate(reads) if one.parts[0][0] in LOADED]
            found = Graph(reads, list(self.writes(region, node.phase)), loaded)
            self.known[key] = found
        return found

    def read(self, region: Region, argument: Argument, k: int) -> Wanted:
        if argument is Argument.BUCKET:
            return self.parameters(argument, region, k)
        if argument is Argument.SAVED:
            return kept(argument, Role.SAVED, region.saved, region)
        if argument is Argument.CARRY:
            return kept(argument, Role.CARRY, region.carry, region)
        gradient = argument is Argument.OUTPUT_GRAD
        value = region.outputs[k] if gradient else self.source(region.inputs[k])
        parts = self.gradients(value) if gradient else ((self.role(value), value, None, None),)
        return Wanted(argument, k, parts, (self.specs(region, value),), self.away(region))

    def writes(self, region: Region, phase: Phase) -> Iterator[Wanted]:
        if phase is F:
            for k, value in enumerate(region.outputs):
                parts = ((Role.ACTIVATION, value, None, None),)
                yield Wanted("output", k, parts, (self.specs(region, value),), self.away(region))
            if region.has_backward:
                yield kept(Argument.SAVED, Role.SAVED, region.saved, region)
        if phase in (B, BI):
            for k in region.input_grads:
                value, specs = region.inputs[k], self.specs(region, region.inputs[k])
                grad = (Role.GRADIENT, value, region.id, None)
                yield Wanted("gradient of input", k, (grad,), (specs,), self.away(region))
        if phase is BI:
            yield kept(Argument.CARRY, Role.CARRY, region.carry, region)
        if phase in (B, BW):
            for bucket in self.model.trained(region):
                grads = ((Role.WEIGHT_GRADIENT, None, region.id, bucket),)
                k = region.buckets.index(bucket)
                yield Wanted("gradient of bucket", k, grads, (self.held_gradients(bucket),))

    def parameters(self, name: str, region: Region, k: int) -> Wanted:
        bucket, roles = region.buckets[k], (Role.WEIGHTS, Role.WHOLE_WEIGHTS)
        parts = tuple((role, None, None, bucket) for role in roles)
        return Wanted(name, k, parts, tuple(self.sizes(bucket, region.id)), shared=True)

    def sizes(self, bucket: BucketId, region: RegionId) -> Iterator[Specs]:
        """Until the gathers pass, nodes at the home of a sharded bucket read the shard itself."""
        held, how = self.held(bucket), self.dag.residencies.get(bucket)
        yield held
        home = self.place.get(self.model.first_uses[bucket])
        if how and how.sharded and how.zero == 3 and self.place.get(region) == home:
            yield shard_specs(messages(held, how.message_bytes, how.ways), how.ways)

    def held(self, bucket: BucketId) -> Specs:
        return self.dag.held(bucket) if self.exchanged else self.model.held(bucket)

    def held_gradients(self, bucket: BucketId) -> Specs:
        return self.model.buckets[bucket].gradients(self.held(bucket))

    def role(self, value: ValueId) -> Role:
        return self.model.values[value].role

    def gradients(self, value: ValueId) -> tuple[Meaning, ...]:
        found: list[Meaning] = [(Role.SEED, value, None, None)] if value == self.model.loss else []
        for name in self.model.contributors.get(value, ()):
            region = self.model.by_id[name]
            if self.converted and region.conversion and region.conversion.backward is Step.NOTHING:
                found += self.gradients(region.outputs[0])
            else:
                found.append((Role.GRADIENT, value, name, None))
        return tuple(found)

    def source(self, value: ValueId) -> ValueId:
        """What is read for a value: once conversions are messages, those that do nothing are
        gone."""
        region = self.model.conversions.get(value) if self.converted else None
        if region and region.conversion and region.conversion.forward is Step.NOTHING:
            return self.source(region.inputs[0])
        return value

    def away(self, region: Region) -> RegionId | None:
        return region.id if self.exchanged and region.id in self.dag.shardings else None

    def specs(self, region: Region, value: ValueId) -> Specs:
        """Sizes at the experts are assumed unchanged; counts are those of the local experts."""
        specs = self.model.values[value].specs
        found = contract(self.model, region) if self.away(region) else None
        if isinstance(found, Contract) and value == region.inputs[found.counts]:
            return (share_of(specs[0], self.dag.shardings[region.id].ways),)
        return specs


def is_converted(dag: Dag) -> bool:
    """Whether conversions are messages already."""
    conversions = {region.id for region in dag.model.conversions.values()}
    return bool(conversions) and not any(node.region in conversions for node in dag.computes)


def kept(name: str, role: Role, specs: Specs, region: Region) -> Wanted:
    return Wanted(name, None, ((role, None, region.id, None),), (specs,))
