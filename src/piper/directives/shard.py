"""Shard: experts divided over devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from piper.directives.arguments import (
    DeviceGroups,
    checked_groups,
    require_free_stream,
    sorted_groups,
)
from piper.directives.base import Directive, directive
from piper.directives.selection import require_whole_regions, selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.ir.sharding import Contract, Sharding, contract
from piper.names import RegionId, amount


@directive()
@dataclass(frozen=True, slots=True)
class Shard(Directive):
    """The experts of the matching regions are divided over the devices; tokens travel to them.

    `devices` are those of `Place`. With a list of lists, `[[0, 2], [4, 6]]`, each inner list holds
    all experts, and the devices with the same experts are replicas of each other.

    An expert region reads tokens sorted by expert (one row per token and expert), and one vector
    of integers: the number of tokens of each expert. It writes one row per row it reads, in the
    same order. The first dimension of its parameters is the number of experts. No token is
    dropped, whatever the counts are.

    rewrite:
        tokens, counts -> F(EP=0) -> tokens               Shard(where(EP=0), [0, 2])
        -->
        tokens, counts -> dispatch -> F(EP=0) -> combine -> tokens     two all-to-alls on
                                                          `stream`, and two for the gradients
    """

    filter: Filter
    devices: DeviceGroups
    stream: str = "ep"

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", checked_groups(self.devices))
        require_free_stream(self.stream, 'stream="ep"')

    @property
    def sharding(self) -> Sharding:
        return Sharding(groups=sorted_groups(self.devices), stream=self.stream)

    def rewrite(self, dag: Dag) -> Dag:
        nodes = selected(dag, self.filter)
        require_whole_regions(dag, self.filter, "experts serve")
        self.require_placed_here(nodes)
        regions = dict.fromkeys(node.region for node in nodes)
        require_not_sharded(dag, regions)
        for region in regions:
            self.require_experts(dag, region)
        more = dict.fromkeys(regions, self.sharding) if self.sharding.ways > 1 else {}
        return dag.known_to(replace(dag, shardings={**dag.shardings, **more}))

    def require_placed_here(self, nodes: Iterable[Compute]) -> None:
        mine = list(self.sharding.devices)
        for node in nodes:
            if node.devices and set(node.devices) != set(mine):
                what = f"{node.region} is placed on devices {list(node.devices)}, not on {mine}"
                fix = f"write devices={list(node.devices)}, or groups of them"
                raise Refused(Problem(what, fix))

    def require_experts(self, dag: Dag, region: RegionId) -> None:
        found = contract(dag.model, dag.model.by_id[region])
        if not isinstance(found, Contract):
            raise Refused(*found)
        ways = self.sharding.ways
        if found.experts % ways:
            good = [n for n in range(2, found.experts + 1) if found.experts % n == 0] or [1]
            raise Refused(
                Problem(
                    f"the {amount(found.experts, 'expert')} of {region} cannot be divided evenly "
                    f"over {ways} devices",
                    f"use {' or '.join(map(str, good[:8]))} devices, or groups such as "
                    "[[0, 1], [2, 3]]",
                )
            )


def require_not_sharded(dag: Dag, regions: Iterable[RegionId]) -> None:
    again = [region for region in regions if region in dag.shardings]
    if again:
        fix = "match each region with exactly one `Shard`"
        raise Refused(Problem(f"{again[0]} is already sharded", fix))
