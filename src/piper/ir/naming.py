"""Names of nodes and values.

Names are made only here, and are only printed and compared. Nothing parses a name: the same facts
are fields of the node, value, region or instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper.names import BucketId, Device, NodeId, Phase, RegionId, ValueId

SEED = ValueId("seed")
RANDOM = ValueId("random")
RANK = ValueId("rank")
TOTALS = ValueId("totals")
TOTALS_NODE = NodeId("totals")
LISTED = 8  # devices that are named one by one


def node_id(region: RegionId, phase: Phase, microbatch: int | None = None) -> NodeId:
    """
    >>> node_id(RegionId("PP0"), Phase.FORWARD, 3)
    'PP0:F@3'
    """
    return NodeId(f"{region}:{phase}{part(microbatch)}")


def part(microbatch: int | None) -> str:
    return "" if microbatch is None else f"@{microbatch}"


def of_microbatch(value: ValueId, microbatch: int | None) -> ValueId:
    """The value of one microbatch; the same name if the batch is not split."""
    return ValueId(f"{value}{part(microbatch)}")


def region_of_size(region: RegionId, size: int) -> RegionId:
    """A region for microbatches of another size."""
    return RegionId(f"{region}|{size}")


def value_of_size(value: ValueId, size: int) -> ValueId:
    return ValueId(f"{value}|{size}")


def batch_input(index: int) -> ValueId:
    return ValueId(f"batch:{index}")


def weights(bucket: BucketId) -> ValueId:
    return ValueId(f"w:{bucket}")


def optimizer_state(bucket: BucketId) -> ValueId:
    return ValueId(f"o:{bucket}")


def updated(state: ValueId) -> ValueId:
    """The parameters after the update. They replace the old ones."""
    return ValueId(f"{state}'")


def whole_weights(bucket: BucketId, number: int | None = None) -> ValueId:
    """Gathered parameters. Without a number, they are gathered once per step."""
    return ValueId(f"W:{bucket}{'' if number is None else f'*{number}'}")


def update_id(bucket: BucketId) -> NodeId:
    return NodeId(f"{bucket}:U")


def saved(region: RegionId) -> ValueId:
    return ValueId(f"saved:{region}")


def carry(region: RegionId) -> ValueId:
    return ValueId(f"carry:{region}")


def on_host(value: ValueId) -> ValueId:
    """The copy of a value in the memory of the host."""
    return ValueId(f"host:{value}")


def fetched(value: ValueId, number: int) -> ValueId:
    """A value that is back from the host, for the first pass that reads it, or a later one."""
    return ValueId(f"back:{value}{f'*{number}' if number else ''}")


def store_id(value: ValueId) -> NodeId:
    return NodeId(f"store {value}")


def fetch_id(back: ValueId) -> NodeId:
    return NodeId(f"fetch {back}")


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
    """The name on the devices of the experts, of an input of `region` or of a result."""
    return ValueId(f"{value}~{'' if region is None else region}")


def arrived(value: ValueId, devices: Sequence[Device]) -> ValueId:
    """The name of a value on the devices that receive it."""
    return ValueId(f"{value}>{short_list(devices)}")


def short_list(devices: Sequence[Device], comma: str = ",") -> str:
    """Names of large jobs must not grow with the number of replicas.

    >>> short_list([1, 3, 5]), short_list(range(1, 4097, 16)), short_list([0, *range(9)])
    ('1,3,5', '1..4081:16', '0,0,1,2,3,4,5,6,7,8')
    """
    if len(devices) > LISTED:
        first, step, last = devices[0], devices[1] - devices[0], devices[-1]
        if step > 0 and tuple(devices) == tuple(range(first, last + 1, step)):
            return f"{first}..{last}:{step}"
    return comma.join(map(str, devices))


def control(number: int) -> ValueId:
    """What a control message brings."""
    return ValueId(f"control:{number}")


def transfer_id(arrived: ValueId) -> NodeId:
    return NodeId(f"send {arrived}")


def collective_id(kind: str, written: ValueId) -> NodeId:
    return NodeId(f"{kind} {written}")


def exchange_id(word: str, node: NodeId) -> NodeId:
    return NodeId(f"{word} {node}")


def sum_buffer(first: ValueId) -> str:
    """The buffer that accumulates a sum, named after its first part."""
    return f"sum {first}"


def replica_buffer(value: ValueId, replica: int) -> ValueId:
    """The buffer of an input of a second replica on the same device."""
    return ValueId(f"{value}#{replica}") if replica else value


def of_replica(node: NodeId, replica: int) -> NodeId:
    """What a device with several replicas of a node calls the node, for each of them."""
    return NodeId(f"{node}#{replica}" if replica else node)


def elsewhere(value: ValueId, replica: int) -> ValueId:
    """What another device has, for one replica."""
    return ValueId(f"{value} of replica {replica}")


def gather_buffer(number: int) -> str:
    return f"buffer {number}"


def sent(node: str) -> str:
    """The sending end of a transfer. A device may be at both ends, for different replicas."""
    return f"{node} (sent)"
