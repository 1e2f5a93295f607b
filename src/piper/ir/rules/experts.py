"""Rules about regions of experts that are sharded."""

from __future__ import annotations

from collections.abc import Iterator

from piper.errors import Problem
from piper.ir.dag import Dag
from piper.ir.placement.replicas import distinct
from piper.ir.rules.neighbours import neighbours, show
from piper.ir.sharding import within


def experts_are_where_they_are_placed(dag: Dag) -> Iterator[Problem]:
    place = {node.region: node.devices or () for node in dag.computes}
    for region, how in dag.shardings.items():
        if set(how.devices) != set(place[region]):
            yield Problem(
                f"{region} is placed on {show(place[region])}, but sharded on {show(how.devices)}",
                f"write devices={list(place[region])} in its `Shard`, or groups of them",
            )


def experts_have_one_replica_on_a_device(dag: Dag) -> Iterator[Problem]:
    """A token all-to-all has one part for each device."""
    place = {node.region: node.devices or () for node in dag.computes}
    for region in dag.shardings:
        devices = place[region]
        if len(distinct(devices)) < len(devices):
            yield Problem(
                f"{region} is sharded, and has several replicas on a device: {show(devices)}",
                "give all regions lists of the same length, in which each device is once",
            )


def neighbours_of_experts_are_with_them(dag: Dag) -> Iterator[Problem]:
    """Tokens are dispatched from the devices of the neighbours, and combined there."""
    if not dag.shardings:
        return
    for one, other in neighbours(dag):
        for region, beside in ((one, other), (other, one)):
            if region[0] in dag.shardings:
                yield Problem(
                    f"{region[0]} is sharded on {show(region[1])}, its neighbour {beside[0]} is on "
                    f"{show(beside[1])}",
                    f"place {beside[0]} on {show(region[1])} too",
                )


def groups_fit_the_experts(dag: Dag) -> Iterator[Problem]:
    """ZeRO groups must divide the holders of each share of the experts in the same way."""
    for bucket, how in dag.residencies.items():
        cut = dag.holding(bucket)
        parts = within(how, cut) if cut else []
        sizes = {len(group) for groups in parts for group in groups}
        what = "it is divided" if dag.divisions else "its experts are"
        if cut and (len(sizes) > 1 or len(set(map(len, parts))) > 1):
            yield Problem(
                f"{bucket} is replicated in groups {[list(g) for g in how.groups]}, but "
                f"{what} in groups {[list(g) for g in cut.groups]}",
                "write the same groups in its `Shard` and its `Replicate`, or no groups in the "
                "`Replicate`",
            )
