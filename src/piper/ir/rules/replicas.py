"""Rules about replicas: their devices, their batches, and what keeps them equal."""

from __future__ import annotations

from collections.abc import Iterator

from piper.errors import Problem
from piper.ir.dag import Dag
from piper.ir.model import Region
from piper.ir.placement.replicas import distinct
from piper.ir.rules.neighbours import show
from piper.names import Device


def replicas_are_kept_equal(dag: Dag) -> Iterator[Problem]:
    """Replicas that do not reduce their gradients would drift apart."""
    place = {node.region: node.devices or () for node in dag.computes}
    for bucket, region in dag.model.first_uses.items():
        devices, used = distinct(place[region]), dag.model.buckets[bucket]
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
                f"write devices={list(distinct(place[region]))} in its `Replicate`",
            )


def replicas_compute_with_no_buffers_they_update(dag: Dag) -> Iterator[Problem]:
    """Each replica sees only its own data, so their buffers differ. The loss must not.

    Buffers that follow from parameters alone are equal where the parameters are, and whole.
    """
    for region, devices in changing(dag):
        is_cut = region.ways > 1 or region.id in dag.shardings
        names = ", ".join(region.reads_state if is_cut else region.varying_state)
        if names and len(devices) > 1:
            yield Problem(
                f"{region.id} updates {names} and computes with it, on {show(devices)}: replicas "
                "would compute with different values",
                f"place {region.id} on one device: devices=[{devices[0]}], or compute with values "
                "that no forward updates",
            )


def replicas_update_what_they_compute_with_once(dag: Dag) -> Iterator[Problem]:
    """A batch updates a buffer once. Microbatches of a replica would do it once for each."""
    many = [f"{name} has {count}" for name, count in dag.dimensions if count > 1]
    for region, devices in changing(dag):
        if many and region.reads_state and len(devices) > 1:
            yield Problem(
                f"{region.id} updates {', '.join(region.reads_state)} and computes with it, in "
                f"each microbatch of replicas on {show(devices)} ({many[0]})",
                "use one microbatch for each replica: leave out `Split`, or write microbatches=1",
            )


def replicas_that_update_buffers_have_devices_of_their_own(dag: Dag) -> Iterator[Problem]:
    """A device has one copy of a buffer."""
    for region, devices in changing(dag):
        if len(distinct(devices)) < len(devices):
            yield Problem(
                f"{region.id} updates buffers (running statistics) on {show(devices)}: replicas "
                "on one device would update the same ones",
                "use a norm without running statistics, put the module in eval mode, or place "
                f"every region on as many devices as {region.id}",
            )


def changing(dag: Dag) -> Iterator[tuple[Region, tuple[Device, ...]]]:
    """The regions that update buffers, and their devices."""
    place = {node.region: node.devices or () for node in dag.computes}
    return ((region, place[region.id]) for region in dag.model.regions if region.stateful)
