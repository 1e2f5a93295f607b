"""Place: where regions run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.directives.base import chosen, device_list
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.names import Device


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

    def rewrite(self, dag: Dag) -> Dag:
        nodes = chosen(dag, self.filter)
        twice = [node for node in nodes if node.devices not in (None, self.devices)]
        if twice:
            raise Refused(*map(self.placed_twice, twice[:3]))
        return dag.with_nodes(
            replace(node, devices=self.devices, stream=self.stream) for node in nodes
        )

    def placed_twice(self, node: Compute) -> Problem:
        return Problem(
            f"{node.id} is on devices {list(node.devices or ())} already, not on {list(self.devices)}",
            "let exactly one `Place` match each region, or give both the same devices",
        )
