"""From the regions of a model to its training DAG: F, B and Update nodes for one batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from piper.ir.dag import Dag
from piper.ir.maker import CAPTURED
from piper.ir.model import Model, Region
from piper.ir.naming import (
    SEED,
    TOTALS,
    TOTALS_NODE,
    bucket_grad,
    carry,
    node_id,
    of_microbatch,
    saved,
    update_id,
    updated,
    value_grad,
    weights,
)
from piper.ir.nodes import Compute, Node, Sum, Totals, Update
from piper.ir.values import OF_THE_STEP, Role, TensorSpec, Value
from piper.names import BI, BW, B, BucketId, F, Phase, RegionId, ValueId

ALL_TOTALS = Value((TensorSpec((2,), "float64"),), Role.TOTALS)


def training_dag(model: Model, clip: bool = False) -> Dag:
    """A forward of every region, a backward of each that has gradients, an update of every bucket.

    With `clip`, updates wait for the norm of all gradients.
    """
    grads = contributions(model)
    forward = [forward_node(region) for region in model.regions]
    backward = [backward_node(model, region, grads) for region in reversed(model.regions)]
    nodes: list[Node] = [*forward, *(node for node in backward if node is not None)]
    steps = list(updates(model, clip))
    losses = (model.loss,)
    reads = (losses, *(step.reads[0] for step in steps))
    nodes += [*steps, Totals(id=TOTALS_NODE, reads=reads, writes=(TOTALS,))]
    return Dag(
        model=model,
        nodes={node.id: node for node in nodes},
        values=all_values(model),
        makers={node.id: CAPTURED for node in nodes},
    )


def contributions(model: Model) -> dict[ValueId, Sum]:
    """The contributions to the gradient of each value; that of the last use comes first."""
    grads: dict[ValueId, Sum] = {model.loss: (SEED,)}
    for value, regions in model.contributors.items():
        parts = tuple(value_grad(value, region) for region in regions)
        grads[value] = (*grads.get(value, ()), *parts)
    return grads


def forward_node(region: Region) -> Compute:
    reads = [weights(bucket) for bucket in region.buckets] + list(region.inputs)
    kept = (saved(region.id),) if region.has_backward else ()
    return Compute(
        id=node_id(region.id, F),
        region=region.id,
        phase=F,
        tags=region.tags,
        reads=tuple((value,) for value in reads),
        writes=(*region.outputs, *kept),
    )


def backward_node(model: Model, region: Region, grads: dict[ValueId, Sum]) -> Compute | None:
    if not region.has_backward:
        return None
    return Compute(
        id=node_id(region.id, B),
        region=region.id,
        phase=B,
        tags=region.tags,
        reads=(
            *((weights(region.buckets[i]),) for i in region.backward_buckets),
            *((region.inputs[i],) for i in region.backward_inputs),
            (saved(region.id),),
            *(grads[region.outputs[i]] for i in region.output_grads),
        ),
        writes=(*input_grads(region), *weight_grads(model, region)),
    )


def input_grads(region: Region) -> tuple[ValueId, ...]:
    return tuple(value_grad(region.inputs[i], region.id) for i in region.input_grads)


def weight_grads(model: Model, region: Region) -> tuple[ValueId, ...]:
    return tuple(bucket_grad(bucket, region.id) for bucket in model.trained(region))


def updates(model: Model, clip: bool) -> Iterator[Update]:
    parts: dict[BucketId, list[ValueId]] = {}
    for region in reversed(model.regions):
        for bucket in model.trained(region):
            parts.setdefault(bucket, []).append(bucket_grad(bucket, region.id))
    for bucket in model.buckets:
        if bucket in parts:
            total = tuple(parts[bucket])
            yield Update(
                id=update_id(bucket),
                bucket=bucket,
                reads=(total, (TOTALS,)) if clip else (total,),
                writes=(updated(weights(bucket)),),
            )


def all_values(model: Model) -> dict[ValueId, Value]:
    values = {name: replace(value, base=name) for name, value in model.values.items()}
    values[TOTALS] = ALL_TOTALS
    values[SEED] = Value(model.values[model.loss].specs, Role.SEED, base=model.loss)
    for bucket in model.buckets.values():
        state = weights(bucket.id)
        old = Value(model.held(bucket.id), Role.WEIGHTS, bundle=True, bucket=bucket.id)
        values[state] = old
        values[updated(state)] = replace(old, role=Role.NEW_WEIGHTS, state=state)
    for region in model.regions:
        values.update(region_values(model, region))
    return values


def step_values(model: Model, dimensions: tuple[tuple[str, int], ...]) -> dict[ValueId, Value]:
    """All values before any pass; one for each microbatch, if the batch is split."""
    values = all_values(model)
    if not dimensions:
        return values
    n = dimensions[0][1]
    shared = {name: value for name, value in values.items() if value.role in OF_THE_STEP}
    some = microbatches_of_values(model)
    return shared | {
        of_microbatch(name, k): value.of(k, n, model.sizes)
        for name, value in values.items()
        if name not in shared
        for k in some.get(name, range(n))
    }


def microbatches_of_values(model: Model) -> dict[ValueId, Sequence[int]]:
    """The microbatches that have each value, where they differ in size; not listed: all."""
    if not model.sizes:
        return {}
    sizes: dict[ValueId, set[int | None]] = {}
    for region in model.regions:
        own = (*(saved(region.id), carry(region.id)), *input_grads(region))
        for name in (*region.inputs, *region.outputs, *own, *weight_grads(model, region)):
            sizes.setdefault(name, set()).add(region.size)
    return {
        name: [k for k, size in enumerate(model.named_sizes) if size in found]
        for name, found in sizes.items()
    }


def region_values(model: Model, region: Region) -> Iterator[tuple[ValueId, Value]]:
    """Values that the nodes of one region write: saved activations, carry, gradients."""
    mine = region.id
    yield from kept_values(region)
    for index in region.input_grads:
        value = region.inputs[index]
        specs = model.values[value].specs
        yield value_grad(value, mine), Value(specs, Role.GRADIENT, base=value, region=mine)
    for bucket in model.trained(region):
        specs = model.buckets[bucket].gradients(model.held(bucket))
        grad = Value(specs, Role.WEIGHT_GRADIENT, bundle=True, bucket=bucket, region=mine)
        yield bucket_grad(bucket, mine), grad


def kept_values(region: Region) -> Iterator[tuple[ValueId, Value]]:
    """What one phase of a region keeps for another."""
    yield saved(region.id), Value(region.saved, Role.SAVED, bundle=True, region=region.id)
    yield carry(region.id), Value(region.carry, Role.CARRY, bundle=True, region=region.id)


def with_regions(dag: Dag, changed: Mapping[RegionId, Region]) -> Dag:
    """Replace some regions by variants that save other values between F and B.

    A new read of one phase is found among the old reads of all phases of its microbatch.
    """
    nodes = [node for node in dag.computes if node.region in changed]
    known: dict[tuple[RegionId, int | None], dict[Read, Sum]] = {}
    for node in nodes:
        names = reads_of(dag.model.by_id[node.region], node.phase)
        reads = known.setdefault((node.region, node.microbatch), {})
        reads.update(zip(names, node.reads, strict=True))

    def reading(node: Compute) -> tuple[Sum, ...]:
        reads = known[node.region, node.microbatch]
        return tuple(reads[name] for name in reads_of(changed[node.region], node.phase))

    values = {
        of_microbatch(name, part): value
        for region, part in known
        for name, value in kept_values(changed[region])
    }
    regions = tuple(changed.get(region.id, region) for region in dag.model.regions)
    other = replace(dag, model=replace(dag.model, regions=regions))
    rewired = (replace(node, reads=reading(node)) for node in nodes)
    return other.with_values(values).with_nodes(rewired)


def split_backward(dag: Dag, node: Compute) -> tuple[Compute, Compute]:
    """Replace B by BI, which writes input gradients and a carry, and BW, which reads the carry."""
    region, part = dag.model.by_id[node.region], node.microbatch
    kept = of_microbatch(carry(region.id), part)
    inputs = len(region.input_grads)
    bi = Compute(
        id=node_id(region.id, BI, part), region=region.id, phase=BI, microbatch=part,
        tags=node.tags, reads=node.reads, writes=(*node.writes[:inputs], kept),
        devices=node.devices, stream=node.stream,
    )  # fmt: skip
    bw = Compute(
        id=node_id(region.id, BW, part), region=region.id, phase=BW, microbatch=part,
        tags=node.tags,
        reads=tuple(
            [(kept,) if k is None else node.reads[k] for k in weight_places(dag.model, region)]
        ),
        writes=node.writes[inputs:],
        devices=node.devices, stream=node.stream,
    )  # fmt: skip
    return bi, bw


def weight_places(model: Model, region: Region) -> list[int | None]:
    """For each read of BW, its position among those of B; None for the carry, which BI makes."""
    known: dict[RegionId, list[int | None]] = model.derived.setdefault(weight_places, {})
    if region.id not in known:
        read, wanted = backward_reads(region), weight_reads(region)
        known[region.id] = [None if one == CARRIED else read.index(one) for one in wanted]
    return known[region.id]


class Argument(StrEnum):
    """What a phase of a region reads."""

    BUCKET = "parameter bucket"
    INPUT = "input"
    SAVED = "saved"
    CARRY = "carry"
    OUTPUT_GRAD = "gradient of output"


Read = tuple[Argument, int]  # and which one of the region's buckets, inputs or outputs
KEPT, CARRIED = (Argument.SAVED, 0), (Argument.CARRY, 0)


def reads_of(region: Region, phase: Phase) -> list[Read]:
    """What a phase reads, in order."""
    match phase:
        case Phase.FORWARD:
            return forward_reads(region)
        case Phase.BACKWARD | Phase.BACKWARD_INPUT:
            return backward_reads(region)
        case Phase.BACKWARD_WEIGHT:
            return weight_reads(region)
        case _:
            assert_never(phase)


def forward_reads(region: Region) -> list[Read]:
    """What F reads, in order."""
    return [
        *((Argument.BUCKET, i) for i in range(len(region.buckets))),
        *((Argument.INPUT, i) for i in range(len(region.inputs))),
    ]


def backward_reads(region: Region) -> list[Read]:
    """What B and BI read, in order."""
    return [
        *((Argument.BUCKET, i) for i in region.backward_buckets),
        *((Argument.INPUT, i) for i in region.backward_inputs),
        KEPT,
        *((Argument.OUTPUT_GRAD, i) for i in region.output_grads),
    ]


def weight_reads(region: Region) -> list[Read]:
    """What BW reads, in order. B reads all of it but the carry."""
    return [
        *((Argument.BUCKET, i) for i in region.weight_buckets),
        *((Argument.INPUT, i) for i in region.weight_inputs),
        CARRIED,
        *((Argument.OUTPUT_GRAD, i) for i in region.weight_output_grads),
    ]
