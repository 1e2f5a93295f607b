"""From the regions of a model to its training DAG: F, B and Update nodes for one batch."""

from collections.abc import Iterator

from piper.ir.dag import Dag
from piper.ir.model import Model, Region
from piper.ir.nodes import Compute, Node, Sum, Totals, Update
from piper.ir.values import Origin, TensorSpec, Value
from piper.names import BI, BW, B, BucketId, F, NodeId, Phase, RegionId, ValueId

SEED = ValueId("seed")
TOTALS = ValueId("totals")


def node_id(region: RegionId, phase: Phase) -> NodeId:
    return NodeId(f"{region}:{phase}")


def weights(bucket: BucketId) -> ValueId:
    return ValueId(f"w:{bucket}")


def saved(region: RegionId) -> ValueId:
    return ValueId(f"saved:{region}")


def carry(region: RegionId) -> ValueId:
    return ValueId(f"carry:{region}")


def value_grad(value: ValueId, region: RegionId) -> ValueId:
    """The part of a value's gradient that one of its uses contributes."""
    return ValueId(f"d:{value}/{region}")


def bucket_grad(bucket: BucketId, region: RegionId) -> ValueId:
    return ValueId(f"g:{bucket}/{region}")


def training_dag(model: Model, clip: bool = False) -> Dag:
    """Every region forward, every region that has gradients backward, every bucket updated.

    With `clip`, updates wait for the norm of all gradients.
    """
    grads = contributions(model)
    forward = [forward_node(region) for region in model.regions]
    backward = [backward_node(model, region, grads) for region in reversed(model.regions)]
    nodes: list[Node] = [*forward, *(node for node in backward if node is not None)]
    steps = list(updates(model, clip))
    losses = (model.loss,)
    reads = (losses, *(step.reads[0] for step in steps))
    nodes += [*steps, Totals(id=NodeId("totals"), reads=reads, writes=(TOTALS,))]
    return Dag(
        model=model,
        nodes={node.id: node for node in nodes},
        values=all_values(model),
        makers={node.id: "capture" for node in nodes},
    )


def contributions(model: Model) -> dict[ValueId, Sum]:
    """Which gradients add up to the gradient of each value; the last use comes first."""
    grads: dict[ValueId, Sum] = {model.loss: (SEED,)}
    for region in reversed(model.regions):
        for index in region.input_grads:
            value = region.inputs[index]
            grads[value] = (*grads.get(value, ()), value_grad(value, region.id))
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
    for bucket in model.buckets.values():
        parts = tuple(
            bucket_grad(bucket.id, region.id)
            for region in reversed(model.regions)
            if bucket.id in model.trained(region)
        )
        if parts:
            yield Update(
                id=NodeId(f"{bucket.id}:U"),
                bucket=bucket.id,
                reads=(parts, (TOTALS,)) if clip else (parts,),
                writes=(ValueId(f"{weights(bucket.id)}'"),),
            )


def all_values(model: Model) -> dict[ValueId, Value]:
    values = dict(model.values)
    values[TOTALS] = Value((TensorSpec((2,), "float64"),))
    values[SEED] = Value(model.values[model.loss].specs, Origin.SEED)
    for bucket in model.buckets.values():
        values[weights(bucket.id)] = Value(bucket.specs, Origin.WEIGHTS, bundle=True)
        values[ValueId(f"{weights(bucket.id)}'")] = Value(bucket.specs, bundle=True)
    for region in model.regions:
        values.update(region_values(model, region))
    return values


def region_values(model: Model, region: Region) -> Iterator[tuple[ValueId, Value]]:
    """What a region's own nodes exchange: saved activations, carry, gradients."""
    yield saved(region.id), Value(region.saved, bundle=True)
    yield carry(region.id), Value(region.carry, bundle=True)
    for index in region.input_grads:
        value = region.inputs[index]
        yield value_grad(value, region.id), Value(model.values[value].specs)
    for bucket in model.trained(region):
        yield bucket_grad(bucket, region.id), Value(model.buckets[bucket].specs, bundle=True)


def split_backward(dag: Dag, node: Compute) -> tuple[Compute, Compute]:
    """B becomes BI, which gives the input gradients and a carry, and BW, which ends the carry."""
    region = dag.model.by_id[node.region]
    read = dict(zip(backward_reads(region), node.reads, strict=True))
    suffix = node.id.removeprefix(node_id(region.id, B))
    kept = ValueId(carry(region.id) + suffix)
    inputs = len(region.input_grads)
    bi = Compute(
        id=NodeId(node_id(region.id, BI) + suffix), region=region.id, phase=BI, tags=node.tags,
        reads=node.reads, writes=(*node.writes[:inputs], kept),
        devices=node.devices, stream=node.stream,
    )  # fmt: skip
    bw = Compute(
        id=NodeId(node_id(region.id, BW) + suffix), region=region.id, phase=BW, tags=node.tags,
        reads=tuple((kept,) if key == "carry" else read[key] for key in weight_reads(region)),
        writes=node.writes[inputs:],
        devices=node.devices, stream=node.stream,
    )  # fmt: skip
    return bi, bw


def backward_reads(region: Region) -> list[str]:
    """A name for each read of B, in order."""
    return [
        *(f"bucket {i}" for i in region.backward_buckets),
        *(f"input {i}" for i in region.backward_inputs),
        "saved",
        *(f"grad {i}" for i in region.output_grads),
    ]


def weight_reads(region: Region) -> list[str]:
    """A name for each read of BW, in order; all but the carry are reads of B."""
    return [
        *(f"bucket {i}" for i in region.weight_buckets),
        *(f"input {i}" for i in region.weight_inputs),
        "carry",
        *(f"grad {i}" for i in region.weight_output_grads),
    ]
