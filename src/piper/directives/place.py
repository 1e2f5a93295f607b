"""Place: where regions run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from piper.directives.arguments import DeviceList, replica_list, require_stream_name
from piper.directives.base import Directive, directive
from piper.directives.selection import selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.maker import Maker
from piper.ir.nodes import Compute
from piper.ir.placement.devices import Devices
from piper.names import NodeId


@directive(example="Place(where(PP=0), [0])")
@dataclass(frozen=True, slots=True)
class Place(Directive):
    """Matching regions run on these devices, one replica on each.

    Regions may have different numbers of devices, and a device may be listed several times. It then
    has several replicas.

    rewrite:
        F(PP=0)  ->  F(PP=1)            Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])
        -->
        F(PP=0) [0, 2]  ->  F(PP=1) [1, 3]     replica i sends to replica i, on `stream`
    """

    filter: Filter
    devices: DeviceList
    stream: str = "pp"

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", replica_list(self.devices))
        require_stream_name(self.stream, 'stream="pp"')

    def rewrite(self, dag: Dag) -> Dag:
        return self.rewrite_all([(Maker("place"), self)], dag)

    @staticmethod
    def rewrite_all(named: Sequence[tuple[Maker, Place]], dag: Dag) -> Dag:
        placed: dict[NodeId, Compute] = {}
        lists: dict[Devices, Devices] = {}  # equal ones become the same object
        for _, place in named:
            devices = replica_list(place.devices)
            devices = lists.setdefault(devices, devices)
            nodes = [placed.get(node.id, node) for node in selected(dag, place.filter)]
            require_one_place(devices, nodes)
            placed.update(
                (node.id, replace(node, devices=devices, stream=place.stream)) for node in nodes
            )
        return dag.with_nodes(placed.values())


def require_one_place(devices: Devices, nodes: Iterable[Compute]) -> None:
    others = {n.region: n.devices for n in nodes if n.devices not in (None, devices)}
    if others:
        fix = "match each region with exactly one `Place`, or give both the same devices"
        raise Refused(
            *(
                Problem(f"{region} is already on devices {list(o or ())}, not {list(devices)}", fix)
                for region, o in others.items()
            )
        )
