"""Rules about replicas: their devices, their batches, and what keeps them equal."""

from __future__ import annotations

from collections.abc import Iterator

from piper.errors import Problem
from piper.ir.dag import Dag
from piper.ir.rules.neighbours import show
from piper.names import amount


def replicas_are_kept_equal(dag: Dag) -> Iterator[Problem]:
    """Replicas that do not reduce their gradients would drift apart."""
    place = {node.region: node.devices or () for node in dag.computes}
    for bucket, region in dag.model.first_uses.items():
        devices, used = place[region], dag.model.buckets[bucket]
        cut = dag.shardings.get(region)
        if cut and cut.ways == len(devices):
            continue  # every device has experts of its own
        if dag.divisions and dag.replicas.ways == len(devices):
            continue  # one team, which divides a batch's work
        if len(devices) > 1 and used.trainable and bucket not in dag.residencies:
            tags = ", ".join(f"{key}={index}" for key, index in dag.model.by_id[region].tags)
            yield Problem(
                f"{region} is on {show(devices)}, and nothing keeps its replicas equal",
                f"add Replicate(where({tags}), devices={list(devices)})",
            )


def replicas_are_where_they_are_placed(dag: Dag) -> Iterator[Problem]:
    place = {node.region: node.devices or () for node in dag.computes}
    for bucket, how in dag.residencies.items():
        region = dag.model.first_uses[bucket]
        if set(how.devices) != set(place[region]):
            yield Problem(
                f"{region} is placed on {show(place[region])}, but replicated on "
                f"{show(how.devices)}",
                f"write devices={list(place[region])} in its `Replicate`",
            )


def replicas_update_no_buffers(dag: Dag) -> Iterator[Problem]:
    """Each replica sees only its own data, so their buffers would drift apart."""
    place = {node.region: node.devices or () for node in dag.computes}
    for region in dag.model.regions:
        if region.stateful and len(place[region.id]) > 1:
            yield Problem(
                f"{region.id} updates buffers (running statistics) on {show(place[region.id])}: "
                "replicas would not stay equal",
                "use a norm without running statistics, put the module in eval mode, or place "
                f"it on one device: devices=[{place[region.id][0]}]",
            )


def feeds_are_alike(dag: Dag) -> Iterator[Problem]:
    """Replicas that share devices get one batch together, so each feed has equally many."""
    found = dag.replicas
    if len(set(map(len, found.feeds))) > 1:
        yield Problem(
            f"some devices serve {amount(len(found.feeds[0]), 'replica')}, others "
            f"{len(found.feeds[-1])}: {[list(row) for row in found.lists]}",
            "give all regions the same device lists, or mirror all of them",
        )
