"""Replicate: how replicas of regions keep their parameters equal, and what they shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from piper.directives.arguments import (
    DeviceGroups,
    checked_groups,
    require_count,
    require_free_stream,
    sorted_groups,
)
from piper.directives.base import Directive, JsonObject, directive
from piper.directives.selection import require_whole_regions, selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.ir.placement.residency import Residency
from piper.names import RegionId

Reduce = Literal["each", "once"]
LEVELS = {
    0: "nothing is sharded",
    1: "optimizer state is sharded",
    2: "gradients too",
    3: "parameters too",
}
BUFFERS = 2  # one that is used, one that is filled
LEVEL_KEYS = ("shard_grads", "shard_params")
RENAMED = {"bucket_size": "bucket_mb", "prefetch_distance": "gather_ahead"}


def from_published(given: JsonObject) -> JsonObject:
    """The published system has two flags for the level, and other names for two arguments."""
    flags = [key for key in LEVEL_KEYS if key in given]
    for key in ("zero", "reduce"):
        if flags and key in given:
            raise Refused(Problem(f"{key} and {flags[0]} say the same thing", f"keep only {key}"))
    ours = {key: value for key, value in given.items() if key not in (*LEVEL_KEYS, *RENAMED)}
    if given.get("shard_params") or given.get("shard_grads"):
        ours["zero"] = 3 if given.get("shard_params") else 2
    if given.get("shard_params") and given.get("shard_grads") is False:
        ours["reduce"] = "once"
    renamed = {RENAMED[key]: given[key] for key in RENAMED if given.get(key) is not None}
    return ours | renamed


@directive(
    omit_defaults=("gather_buffers", "reduce"),
    published=(*LEVEL_KEYS, *RENAMED),
    translate=from_published,
    example="Replicate(where(), [0, 1])",
)
@dataclass(frozen=True, slots=True)
class Replicate(Directive):
    """Replicas of the matching regions stay equal: their gradients are averaged.

    `zero` says what is sharded over the replicas: 0 nothing, 1 optimizer state, 2 gradients too,
    3 parameters too. `devices` are those of `Place`. With a list of lists, `[[0, 1], [2, 3]]`,
    state is sharded within each inner list and replicated across them.

    A message has up to `bucket_mb` megabytes. With zero=3, parameters are gathered `gather_ahead`
    passes before they are used, for at most `gather_buffers` regions at once. If you do not say,
    that is for 2, and for more where that does not raise the peak of the step. Pipelines then hold
    all of them where a known memory allows it.

    `reduce` says when gradients are reduced: for "each" microbatch (zero=2 and 3), or "once" per
    step (zero=0 and 1). zero=3 also allows "once": it sends less, and keeps whole gradients until
    the end of the step. If you do not say, zero=2 and 3 reduce once where a known memory allows it;
    zero=2 is then zero=1.

    rewrite:
        B@0, B@1 -> Update                     Replicate(where(PP=0), [0, 2], zero)
        -->
        zero=0, once per step:
            B@0, B@1 -> all-reduce -> Update
        zero=1, and zero=3 with reduce="once", once per step:
            B@0, B@1 -> reduce-scatter -> Update of a shard
        zero=2 and 3, as each microbatch produces its gradients:
            B@0 -> reduce-scatter -> Update of a shard
            B@1 -> reduce-scatter -/
        zero=1 and 2, once per step; zero=3, before use, dropped after:
            all-gather -> F, B
    """

    filter: Filter
    devices: DeviceGroups
    zero: int = 0
    bucket_mb: float = 25.0
    reduce_stream: str = "dp"
    gather_stream: str = "dp"
    gather_ahead: int = 1
    gather_buffers: int | None = None
    reduce: Reduce | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", checked_groups(self.devices))
        require_level(self.zero)
        require_size(self.bucket_mb)
        require_count("gather_ahead", self.gather_ahead, 0)
        if self.gather_buffers is not None:
            require_count("gather_buffers", self.gather_buffers, 1)
        require_reduce(self.zero, self.reduce)
        require_free_stream(self.reduce_stream, 'reduce_stream="dp"')
        require_free_stream(self.gather_stream, 'gather_stream="dp"')

    @property
    def residency(self) -> Residency:
        return Residency(
            groups=sorted_groups(self.devices), zero=self.zero,
            message_bytes=int(self.bucket_mb * 2**20), reduce_stream=self.reduce_stream,
            gather_stream=self.gather_stream, gather_ahead=self.gather_ahead,
            gather_buffers=self.gather_buffers or BUFFERS,
            once=self.zero < 2 or self.reduce == "once",
            holds_more=self.zero == 3 and self.gather_buffers is None,
        )  # fmt: skip

    def rewrite(self, dag: Dag) -> Dag:
        nodes = selected(dag, self.filter)
        require_whole_regions(dag, self.filter, "parameters serve")
        self.require_placed_here(nodes)
        regions = dict.fromkeys(node.region for node in nodes)
        require_not_replicated(dag, regions)
        mine = [b for b, region in dag.model.first_uses.items() if region in regions]
        wider = replace(dag, residencies={**dag.residencies, **dict.fromkeys(mine, self.residency)})
        return dag.known_to(replace(wider, replicated=(*dag.replicated, *regions)))

    def require_placed_here(self, nodes: Iterable[Compute]) -> None:
        mine = list(self.residency.devices)
        others = {n.region: n.devices for n in nodes if n.devices and set(n.devices) != set(mine)}
        if others:
            raise Refused(
                *(
                    Problem(
                        f"{region} is placed on devices {list(devices)}, not on {mine}",
                        f"write devices={list(devices)}, or place it on {mine}",
                    )
                    for region, devices in others.items()
                )
            )


def require_level(zero: object) -> None:
    if type(zero) is not int or zero not in LEVELS:
        levels = ", ".join(f"{level} ({what})" for level, what in LEVELS.items())
        raise Refused(Problem(f"zero={zero!r} is not a ZeRO level", f"write one of {levels}"))


def require_size(megabytes: object) -> None:
    number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
    if not number or not 0 < megabytes < float("inf"):  # type: ignore[operator]
        raise Refused(
            Problem(
                f"bucket_mb={megabytes!r} is not a message size",
                "write a number of megabytes above 0, such as 25; a larger parameter gets a "
                "message of its own",
            )
        )


def require_reduce(zero: int, reduce: object) -> None:
    """Only zero=3 has a choice. With other levels, the other choice is another level."""
    if reduce not in (None, "each", "once"):
        fix = 'write "each" (microbatch) or "once" (per step)'
        raise Refused(Problem(f"reduce={reduce!r} does not say when to reduce gradients", fix))
    if zero < 2 and reduce == "each":
        fix = 'write zero=2, which shards gradients, or leave out reduce="each"'
        raise Refused(Problem(f"zero={zero} keeps whole gradients and reduces them once", fix))
    if zero == 2 and reduce == "once":
        fix = "write zero=1, which keeps whole gradients until they are reduced"
        raise Refused(Problem("zero=2 shards gradients, so it reduces each microbatch's", fix))


def require_not_replicated(dag: Dag, regions: Iterable[RegionId]) -> None:
    again = [region for region in regions if region in dag.replicated]
    if again:
        fix = "match each region with exactly one `Replicate`"
        raise Refused(*(Problem(f"{region} is already replicated", fix) for region in again))
