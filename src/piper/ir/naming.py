"""How nodes and values are called.

A name is made here and nowhere else, and only ever printed and compared. What it says is in the
fields of the node, value, region or instruction that has it: nobody takes a name apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper.names import BucketId, Device, NodeId, Phase, RegionId, ValueId

SEED = ValueId("seed")
RANDOM = ValueId("random")
RANK = ValueId("rank")
TOTALS = ValueId("totals")
TOTALS_NODE = NodeId("totals")


def node_id(region: RegionId, phase: Phase, microbatch: int | None = None) -> NodeId:
    """
    >>> node_id(RegionId("PP0"), Phase.FORWARD, 3)
    'PP0:F@3'
    """
    return NodeId(f"{region}:{phase}{part(microbatch)}")


def part(microbatch: int | None) -> str:
    return "" if microbatch is None else f"@{microbatch}"


def of_microbatch(value: ValueId, microbatch: int | None) -> ValueId:
    """One microbatch's own; as it was where nothing is split."""
    return ValueId(f"{value}{part(microbatch)}")


def batch_input(index: int) -> ValueId:
    return ValueId(f"batch:{index}")


def weights(bucket: BucketId) -> ValueId:
    return ValueId(f"w:{bucket}")


def updated(state: ValueId) -> ValueId:
    """New parameters, in the place of the old ones."""
    return ValueId(f"{state}'")


def whole_weights(bucket: BucketId, number: int | None = None) -> ValueId:
    """Gathered once for the step, or (with a number) wherever they are used."""
    return ValueId(f"W:{bucket}{'' if number is None else f'*{number}'}")


def update_id(bucket: BucketId) -> NodeId:
    return NodeId(f"{bucket}:U")


def saved(region: RegionId) -> ValueId:
    return ValueId(f"saved:{region}")


def carry(region: RegionId) -> ValueId:
    return ValueId(f"carry:{region}")


def value_grad(value: ValueId, region: RegionId) -> ValueId:
    """The part of a value's gradient that one of its uses contributes."""
    return ValueId(f"d:{value}/{region}")


def bucket_grad(bucket: BucketId, region: RegionId) -> ValueId:
    return ValueId(f"g:{bucket}/{region}")


def gradient_shard(bucket: BucketId, region: RegionId, microbatch: int | None) -> ValueId:
    return ValueId(f"S:{bucket}/{region}{part(microbatch)}")


def gradient_sum(bucket: BucketId) -> ValueId:
    return ValueId(f"R:{bucket}")


def route(region: RegionId, microbatch: int | None) -> ValueId:
    return ValueId(f"route:{region}{part(microbatch)}")


def at_experts(value: ValueId, region: RegionId | None = None) -> ValueId:
    """What a value is called on the devices of the experts: as they read it, or as they made it."""
    return ValueId(f"{value}~{'' if region is None else region}")


def arrived(value: ValueId, devices: Sequence[Device]) -> ValueId:
    """What a value is called where it was sent to."""
    return ValueId(f"{value}>{','.join(map(str, devices))}")


def transfer_id(arrived: ValueId) -> NodeId:
    return NodeId(f"send {arrived}")


def collective_id(kind: str, written: ValueId) -> NodeId:
    return NodeId(f"{kind} {written}")


def exchange_id(word: str, node: NodeId) -> NodeId:
    return NodeId(f"{word} {node}")


def sum_buffer(first: ValueId) -> str:
    """The buffer in which a device adds up a sum, by its first part."""
    return f"sum {first}"


def replica_buffer(value: ValueId, replica: int) -> str:
    """The buffer of an input of a second replica on the same device."""
    return f"{value}#{replica}" if replica else value


def gather_buffer(number: int) -> str:
    return f"buffer {number}"


def sent(node: str) -> str:
    """One end of a transfer: a device may be at both ends of it, for different replicas."""
    return f"{node} (sent)"
