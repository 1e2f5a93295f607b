"""What a device holds of a bucket: all of it, some of its experts, or a shard of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piper.ir.dag import Dag
from piper.ir.flat_layout import Message, messages
from piper.names import BucketId, Device
from piper.plan.instructions import Layout


def held(dag: Dag, bucket: BucketId, device: Device) -> tuple[Any, ...]:
    """The last fields of a State: the shard of the bucket, and the part of its experts."""
    how, cut = dag.residencies.get(bucket), dag.pieces(bucket)
    share = (cut.share(device), cut.ways, dag.model.buckets[bucket].cuts) if cut else (0, 1, ())
    if how is None or not how.sharded:
        return (0, 1, (), *share)
    group = next(group for group in how.groups if device in group)
    layout = layouts(messages(dag.held(bucket), how.message_bytes, how.ways))
    return (group.index(device), how.ways, layout, *share)


def layouts(found: Sequence[Message]) -> tuple[Layout, ...]:
    return tuple((message.dtype, message.tensors, message.padded) for message in found)
