"""What a device contributes to the loss and norm all-reduce: everything is counted once."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Kind, Totals
from piper.names import Device, ValueId
from piper.plan.lower.device_work import DeviceWork


def counts(dag: Dag, device: Device, value: ValueId, number: int) -> bool:
    """Whether a device counts gradient `number` of the norm, which is `value`.

    A sum that a whole group holds is counted by one member. The members take turns.
    """
    maker = dag.nodes[dag.producers[value]]
    shared = isinstance(maker, Collective) and maker.kind is Kind.ALL_REDUCE
    if shared and device not in {group[number % len(group)] for group in maker.groups}:  # type: ignore[union-attr]
        return False
    return of_member(dag, device, value, number)


def of_member(dag: Dag, device: Device, value: ValueId, number: int) -> bool:
    """Whether it is the turn of this member of a team, of which some have the same gradient."""
    bucket = dag.values[value].bucket
    same = dag.repeating(bucket) if bucket is not None else None
    return same is None or same.share(device) == number % same.ways


def losses_of(
    work: DeviceWork, node: Totals, here: Collection[ValueId]
) -> Iterator[tuple[str, int]]:
    """The losses that a device has, each with the number of its microbatch in the batch.

    Of devices that divide regions, the first counts it.
    """
    for part, loss in enumerate(node.reads[0]):
        if loss not in here:
            continue
        if work.dag.member(work.device) == 0:
            devices = work.dag.nodes[work.dag.producers[loss]].devices or ()
            first, _ = work.replicas.place(devices, work.device)
            yield loss, first * len(node.reads[0]) + part
