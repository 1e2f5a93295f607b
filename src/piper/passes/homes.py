"""Where buckets live and are updated, and where totals are added up."""

from __future__ import annotations

from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.nodes import Node, Totals, Update
from piper.names import BucketId, Device

Devices = tuple[Device, ...]


def with_homes(dag: Dag) -> Dag:
    """A bucket lives where its first region runs; there it is updated. Totals are everywhere."""
    homes = bucket_homes(dag)
    moved: list[Node] = [
        replace(node, devices=homes[node.bucket])
        for node in dag.nodes.values()
        if isinstance(node, Update)
    ]
    moved += [
        replace(node, devices=dag.devices)
        for node in dag.nodes.values()
        if isinstance(node, Totals)
    ]
    return dag.moved(moved)


def bucket_homes(dag: Dag) -> dict[BucketId, Devices]:
    place = {node.region: node.devices or () for node in dag.computes}
    return {bucket: place[region] for bucket, region in dag.model.first_uses.items()}
