"""Pairs of regions on different devices, one of which reads from the other."""

from __future__ import annotations

from piper.ir.dag import Dag
from piper.names import RegionId

Home = tuple[RegionId, tuple[int, ...]]


def neighbours(dag: Dag) -> list[tuple[Home, Home]]:
    """Pairs of regions on different devices.

    The second reads values that the first writes, or parameters whose home is there.
    """
    place = {node.region: node.devices or () for node in dag.computes}
    writer = {value: region.id for region in dag.model.regions for value in region.outputs}
    pairs = dict.fromkeys(
        (writer[value], region.id)
        for region in dag.model.regions
        for value in region.inputs
        if value in writer
    )
    pairs |= dict.fromkeys(
        (dag.model.first_uses[bucket], region.id)
        for region in dag.model.regions
        for bucket in region.buckets
    )
    found = [((a, place[a]), (b, place[b])) for a, b in pairs]
    return [(one, other) for one, other in found if one[1] != other[1]]


def show(devices: tuple[int, ...] | None) -> str:
    return f"devices {list(devices)}" if devices else "no device"
