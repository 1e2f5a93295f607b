"""Which passes read parameters of which their device holds a shard only (zero=3)."""

from __future__ import annotations

from collections.abc import Iterator

from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.ir.values import Role
from piper.names import BucketId, ValueId


def sharded_reads(dag: Dag, node: Compute) -> Iterator[BucketId]:
    """The buckets that a node reads whole, and of which its device holds a shard only."""
    for total in node.reads:
        known = dag.values[total[0]]
        if known.role is Role.WEIGHTS and not known.copy:
            bucket = bucket_of(dag, total[0])
            how = dag.residencies.get(bucket)
            if how and how.sharded and how.zero == 3:
                yield bucket


def bucket_of(dag: Dag, value: ValueId) -> BucketId:
    bucket = dag.values[value].bucket
    assert bucket is not None, f"{value} belongs to no bucket"
    return bucket
