"""Shard: experts divided over devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from piper.directives.base import chosen
from piper.directives.replicate import (
    device_groups,
    refuse_parts,
    refuse_stream,
    sorted_devices,
)
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.ir.sharding import Contract, Sharding, contract
from piper.names import Device, RegionId


@dataclass(frozen=True, slots=True)
class Shard:
    """The experts of the matching regions are divided over the devices; tokens travel to them.

    `devices` are those of `Place`. As a list of lists, `[[0, 2], [4, 6]]`, each inner list has all
    experts together, and the devices with the same experts are replicas of each other.

    A region of experts reads rows of tokens, sorted by expert, and one vector of whole numbers:
    how many rows each expert has. It writes rows in the same order. The first dimension of its
    parameters is the number of experts. No token is dropped, whatever the counts are.

    rewrite:
        rows, counts -> F(EP=0) -> rows                   Shard(where(EP=0), [0, 2])
        -->
        rows, counts -> exchange -> F(EP=0) -> exchange -> rows        on `stream`; the gradients
                                                          of rows travel in the same way
    """

    filter: Filter
    devices: tuple[Device, ...] | tuple[tuple[Device, ...], ...]
    stream: str = "ep"

    def __post_init__(self) -> None:
        groups = device_groups(self.devices)
        flat = isinstance(self.devices, range) or type(self.devices[0]) is int
        object.__setattr__(self, "devices", groups[0] if flat else groups)
        refuse_stream(self.stream, 'stream="ep"')

    @property
    def sharding(self) -> Sharding:
        groups = tuple(map(sorted_devices, device_groups(self.devices)))
        return Sharding(groups=groups, stream=self.stream)

    def rewrite(self, dag: Dag) -> Dag:
        nodes = chosen(dag, self.filter)
        refuse_parts(self.filter, dag)
        self.refuse_elsewhere(nodes)
        regions = dict.fromkeys(node.region for node in nodes)
        refuse_twice(dag, regions)
        for region in regions:
            self.require_experts(dag, region)
        more = dict.fromkeys(regions, self.sharding) if self.sharding.ways > 1 else {}
        return dag.known_to(replace(dag, shardings={**dag.shardings, **more}))

    def refuse_elsewhere(self, nodes: Iterable[Compute]) -> None:
        mine = self.sharding.devices
        for node in nodes:
            if node.devices and set(node.devices) != set(mine):
                raise Refused(
                    Problem(
                        f"{node.region} is placed on devices {list(node.devices)}, "
                        f"not on {list(mine)}",
                        f"write devices={list(node.devices)}, or groups of them",
                    )
                )

    def require_experts(self, dag: Dag, region: RegionId) -> None:
        found = contract(dag.model, dag.model.by_id[region])
        if not isinstance(found, Contract):
            raise Refused(*found)
        ways = self.sharding.ways
        if found.experts % ways:
            good = [n for n in range(2, found.experts + 1) if found.experts % n == 0] or [1]
            raise Refused(
                Problem(
                    f"{region} has {found.experts} experts, which {ways} devices cannot share "
                    "evenly",
                    f"divide them over {' or '.join(map(str, good[:8]))} devices, or write groups "
                    "such as [[0, 1], [2, 3]]",
                )
            )


def refuse_twice(dag: Dag, regions: Iterable[RegionId]) -> None:
    again = [region for region in regions if region in dag.shardings]
    if again:
        raise Refused(
            Problem(f"{again[0]} is sharded already", "let exactly one `Shard` match each region")
        )
