"""The home of each bucket: the devices that hold and update it."""

from __future__ import annotations

from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.nodes import Node, Totals, Update
from piper.ir.placement.replicas import distinct
from piper.names import BucketId, Device

Devices = tuple[Device, ...]


def with_homes(dag: Dag) -> Dag:
    """A bucket is at home where its first region runs. The norm is computed on all devices."""
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
    """Replicas on one device share their parameters."""
    return {bucket: distinct(devices) for bucket, devices in bucket_replicas(dag).items()}


def bucket_replicas(dag: Dag) -> dict[BucketId, Devices]:
    """The device of each replica of a bucket's first region."""
    place = {node.region: node.devices or () for node in dag.computes}
    return {bucket: place[region] for bucket, region in dag.model.first_uses.items()}
