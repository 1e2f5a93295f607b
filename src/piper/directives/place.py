"""Place: where regions run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from piper.directives.base import chosen, device_list
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.names import Device, NodeId


@dataclass(frozen=True, slots=True)
class Place:
    """Matching regions run on these devices, one replica on each.

    rewrite:
        F(PP=0)  ->  F(PP=1)            Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])
        -->
        F(PP=0) [0, 2]  ->  F(PP=1) [1, 3]     replica i sends to replica i, on `stream`
    """

    filter: Filter
    devices: tuple[Device, ...]
    stream: str = "pp"

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", device_list(self.devices))
        if not isinstance(self.stream, str):
            raise Refused(Problem(f"stream {self.stream!r} is no name", 'write stream="pp"'))

    def rewrite(self, dag: Dag) -> Dag:
        return apply_places([self], dag)


def apply_places(places: Iterable[Place], dag: Dag) -> Dag:
    """Many places as one rewrite."""
    placed: dict[NodeId, Compute] = {}
    lists: dict[tuple[Device, ...], tuple[Device, ...]] = {}  # equal ones become the same object
    for place in places:
        devices = lists.setdefault(place.devices, place.devices)
        nodes = [placed.get(node.id, node) for node in chosen(dag, place.filter)]
        refuse_twice(place, nodes)
        placed.update(
            (node.id, replace(node, devices=devices, stream=place.stream)) for node in nodes
        )
    return dag.with_nodes(placed.values())


def refuse_twice(place: Place, nodes: Iterable[Compute]) -> None:
    found = {n.region: n.devices for n in nodes if n.devices not in (None, place.devices)}
    if found:
        raise Refused(
            *(
                Problem(
                    f"{region} is on devices {list(devices or ())} already, "
                    f"not on {list(place.devices)}",
                    "let exactly one `Place` match each region, or give both the same devices",
                )
                for region, devices in found.items()
            )
        )
