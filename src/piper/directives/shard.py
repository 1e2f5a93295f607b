"""Shard: regions divided over devices."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from piper.directives.arguments import (
    DeviceGroups,
    ParameterPlan,
    checked_groups,
    checked_plan,
    require_free_stream,
    sorted_groups,
)
from piper.directives.base import Directive, directive
from piper.directives.selection import require_whole_regions, selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.ir.placement.division import Attention
from piper.ir.sharding import Contract, Division, Sharding, contract
from piper.names import RegionId, amount

What = Literal["experts", "weights", "tokens"]
STREAMS = {"experts": "ep", "weights": "tp", "tokens": "cp"}


@directive(
    omit_defaults=("what", "plan", "attention"), example='Shard(where(), [0, 1], what="weights")'
)
@dataclass(frozen=True, slots=True)
class Shard(Directive):
    """The matching regions are divided over the devices.

    `devices` are those of `Place`. With a list of lists, `[[0, 2], [4, 6]]`, each inner list has
    the whole region, and devices with the same part are replicas of each other.

    `what` says what is divided: "experts" (expert parallelism), "weights" (tensor and sequence
    parallelism) or "tokens" (context parallelism). `stream` is that of the messages: "ep", "tp" or
    "cp" by default.

    With "weights" and "tokens", all devices of a group get the same batch. Piper cuts parameters
    and activations so that devices send as little as possible. `plan` fixes how some parameters
    are cut, by patterns of their names or their modules' names: {"layers.*.up_proj": "colwise"}.

    With "tokens", `attention` says how devices attend to each other's tokens. With "ring", keys and
    values travel from device to device while each attends to those that it has. "zigzag" is a ring
    where each device has an early and a late part of the tokens, so that causal attention is
    equally much work for all. By default, heads are exchanged, or keys and values are gathered,
    whichever sends less.

    A region that both `Shard`s of experts and of weights or tokens match is one of experts.

    With "experts", tokens travel to the devices of their experts. An expert region reads tokens
    sorted by expert (one row per token and expert), and one vector of integers: the number of
    tokens of each expert. It writes one row per row it reads, in the same order. The first
    dimension of its parameters is the number of experts. No token is dropped, whatever the counts
    are.

    rewrite:
        tokens, counts -> F(EP=0) -> tokens               Shard(where(EP=0), [0, 2])
        -->
        tokens, counts -> dispatch -> F(EP=0) -> combine -> tokens     two all-to-alls on
                                                          `stream`, and two for the gradients

        F(PP=0)                                           Shard(where(PP=0), [0, 1],
        -->                                                     what="weights")
        F(PP=0) -> all-reduce -> F(PP=0, RUN=2) -> ...    each device has a part of the weights
    """

    filter: Filter
    devices: DeviceGroups
    stream: str | None = None
    what: What = "experts"
    plan: ParameterPlan = None
    attention: Attention | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", checked_groups(self.devices))
        if self.what not in tuple(STREAMS):
            fix = 'write "experts", "weights" or "tokens"'
            raise Refused(Problem(f"what={self.what!r} cannot be divided", fix))
        if self.stream is None:
            object.__setattr__(self, "stream", STREAMS[self.what])
        require_free_stream(self.stream, f'stream="{STREAMS[self.what]}"')
        object.__setattr__(self, "plan", checked_plan(self.plan))
        if self.plan and self.what == "experts":
            fix = 'write what="weights", or leave out plan'
            raise Refused(Problem("plan says how weights are cut, and experts are divided", fix))
        self.require_attention()

    def require_attention(self) -> None:
        if self.attention not in (None, "ring", "zigzag"):
            fix = 'write "ring" or "zigzag", or leave it out'
            raise Refused(Problem(f"attention={self.attention!r} is not known", fix))
        if self.attention and self.what != "tokens":
            what = f'attention="{self.attention}" is about tokens, and {self.what} are divided'
            raise Refused(Problem(what, 'write what="tokens", or leave out attention'))

    @property
    def sharding(self) -> Sharding:
        return Sharding(groups=sorted_groups(self.devices), stream=str(self.stream))

    def rewrite(self, dag: Dag) -> Dag:
        nodes = selected(dag, self.filter)
        require_whole_regions(dag, self.filter, f"{self.what} serve")
        self.require_placed_here(nodes)
        regions = dict.fromkeys(node.region for node in nodes)
        more = dict.fromkeys(regions, self.sharding) if self.sharding.ways > 1 else {}
        if self.what != "experts":
            dense = [region for region in more if region not in dag.shardings]
            divided = {region: self.divided(region, dag.divisions.get(region)) for region in dense}
            return dag.known_to(replace(dag, divisions={**dag.divisions, **divided}))
        require_not_sharded(regions, dag.shardings)
        for region in regions:
            self.require_experts(dag, region)
        rest = {region: how for region, how in dag.divisions.items() if region not in more}
        return dag.known_to(replace(dag, divisions=rest, shardings={**dag.shardings, **more}))

    def require_placed_here(self, nodes: Iterable[Compute]) -> None:
        mine = list(self.sharding.devices)
        for node in nodes:
            if node.devices and set(node.devices) != set(mine):
                what = f"{node.region} is placed on devices {list(node.devices)}, not on {mine}"
                fix = f"write devices={list(node.devices)}, or groups of them"
                raise Refused(Problem(what, fix))

    def divided(self, region: RegionId, known: Division | None) -> Division:
        """By tokens and by weights, if it is divided by the other already."""
        known = known or Division()
        if getattr(known, self.what) is not None:
            require_not_sharded([region], [region])
        found = replace(known, **{self.what: self.sharding})
        if not found.is_grid:
            tokens, weights = ([list(group) for group in axis.groups] for axis in found.axes)
            what = f"{region} is divided by tokens over {tokens} and by weights over {weights}"
            fix = (
                "let the groups be rows and columns of one grid of devices, such as [[0, 2], "
                "[1, 3]] for tokens and [[0, 1], [2, 3]] for weights"
            )
            raise Refused(Problem(f"{what}, which are not a grid", fix))
        return found

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


def require_not_sharded(regions: Iterable[RegionId], known: Container[RegionId]) -> None:
    """Experts in a stage whose weights are divided stay experts: that is not twice."""
    again = [region for region in regions if region in known]
    if again:
        fix = "match each region with exactly one `Shard`"
        raise Refused(Problem(f"{again[0]} is already sharded", fix))
