"""Replicate: how the replicas of regions share parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from piper.directives.base import chosen, device_list
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.ir.residency import Residency
from piper.names import COMPUTE, PASS, TOTALS_STREAM, WEIGHTS_STREAM, Device, RegionId

RESERVED = (COMPUTE, TOTALS_STREAM, WEIGHTS_STREAM)  # streams that Piper uses for itself
LEVELS = {
    0: "nothing is sharded",
    1: "the optimizer's state is",
    2: "gradients are too",
    3: "parameters are too",
}


@dataclass(frozen=True, slots=True)
class Replicate:
    """Replicas of the matching regions stay equal: their gradients are averaged.

    `zero` says what they share instead of each keeping a copy: 0 nothing, 1 the optimizer's state,
    2 gradients too, 3 parameters too. `devices` are those of `Place`; as a list of lists,
    `[[0, 1], [2, 3]]`, state is sharded within each inner list and replicated across them.

    Messages have up to `bucket_mb` megabytes. With zero=3, parameters are gathered `gather_ahead`
    pieces of work before they are used, for at most `gather_buffers` regions at once.

    `reduce` says when gradients are: "each" microbatch (zero=2 and 3), or "once" per step (zero=0
    and 1). zero=3 may have "once" too: it sends less, and keeps whole gradients until then.

    rewrite:
        B@0, B@1 -> Update                                  Replicate(where(PP=0), [0, 2], zero)
        -->
        B@0, B@1 -> all-reduce -> Update                    zero=0: once per step
        B@0, B@1 -> reduce-scatter -> Update of a shard     zero=1: once per step
        B@0 -> reduce-scatter -> Update of a shard          zero=2 and 3: as each microbatch
        B@1 -> reduce-scatter -/                                produces its gradients
                                                                zero=3, "once": as zero=1
        all-gather -> F, B                                  zero=1 and 2: once per step
                                                            zero=3: before use, dropped after
    """

    filter: Filter
    devices: tuple[Device, ...] | tuple[tuple[Device, ...], ...]
    zero: int = 0
    bucket_mb: float = 25.0
    reduce_stream: str = "dp"
    gather_stream: str = "dp"
    gather_ahead: int = 1
    gather_buffers: int = 2
    reduce: str | None = None

    def __post_init__(self) -> None:
        groups = device_groups(self.devices)
        flat = isinstance(self.devices, range) or type(self.devices[0]) is int
        object.__setattr__(self, "devices", groups[0] if flat else groups)
        refuse_numbers(self)
        refuse_reduce(self.zero, self.reduce)
        for stream in (self.reduce_stream, self.gather_stream):
            refuse_stream(stream)

    @property
    def residency(self) -> Residency:
        return Residency(
            groups=tuple(map(sorted_devices, device_groups(self.devices))), zero=self.zero,
            message_bytes=int(self.bucket_mb * 2**20), reduce_stream=self.reduce_stream,
            gather_stream=self.gather_stream, gather_ahead=self.gather_ahead,
            gather_buffers=self.gather_buffers, once=self.zero < 2 or self.reduce == "once",
        )  # fmt: skip

    def rewrite(self, dag: Dag) -> Dag:
        nodes = chosen(dag, self.filter)
        refuse_parts(self.filter, dag)
        self.refuse_elsewhere(nodes)
        regions = dict.fromkeys(node.region for node in nodes)
        mine = [b for b, region in dag.model.first_uses.items() if region in regions]
        refuse_twice(dag, regions)
        wider = replace(dag, residencies={**dag.residencies, **dict.fromkeys(mine, self.residency)})
        known = (*dag.replicated, *regions)
        return dag.known_to(replace(wider, replicated=known))

    def refuse_elsewhere(self, nodes: Iterable[Compute]) -> None:
        mine = self.residency.devices
        found = {n.region: n.devices for n in nodes if n.devices and set(n.devices) != set(mine)}
        if found:
            raise Refused(
                *(
                    Problem(
                        f"{region} is placed on devices {list(devices)}, not on {list(mine)}",
                        f"write devices={list(devices)}, or place it on {list(mine)}",
                    )
                    for region, devices in found.items()
                )
            )


def refuse_parts(wanted: Filter, dag: Dag) -> None:
    names = (PASS, *(name for name, _ in dag.dimensions))
    wrong = [key for key in wanted.keys if key in names]
    if wrong:
        raise Refused(
            Problem(
                f"{wanted} names a part of the work, parameters serve all of it",
                f"leave {wrong[0]} out of the filter",
            )
        )


def sorted_devices(group: tuple[Device, ...]) -> tuple[Device, ...]:
    """Communicators count their members in rising order; shards do too."""
    return tuple(sorted(group))


def device_groups(devices: object) -> tuple[tuple[Device, ...], ...]:
    """A list of devices is one group; a list of lists is one group each, all equally long."""
    rows = devices if isinstance(devices, list | tuple) else ()
    if not rows or not all(isinstance(row, list | tuple | range) for row in rows):
        return (device_list(devices),)  # type: ignore[arg-type]
    groups = tuple(device_list(row) for row in rows)
    flat = [device for group in groups for device in group]
    if len(set(map(len, groups))) > 1 or len(set(flat)) < len(flat):
        raise Refused(
            Problem(
                f"the groups {[list(group) for group in groups]} are not equally long, or share "
                "a device",
                "write groups such as [[0, 1], [2, 3]]",
            )
        )
    return groups


def refuse_numbers(given: Replicate) -> None:
    if type(given.zero) is not int or given.zero not in LEVELS:
        known = ", ".join(f"{level} ({what})" for level, what in LEVELS.items())
        raise Refused(Problem(f"zero={given.zero!r} is no level", f"write one of {known}"))
    size = given.bucket_mb
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
        raise Refused(
            Problem(
                f"bucket_mb={size!r} is no size of a message",
                "write a number of megabytes above 0, such as 25; a parameter that is larger "
                "has a message of its own",
            )
        )
    refuse_count("gather_ahead", given.gather_ahead, 0)
    refuse_count("gather_buffers", given.gather_buffers, 1)


def refuse_reduce(zero: int, reduce: str | None) -> None:
    """Only zero=3 has a choice: else another level is what such gradients mean."""
    if reduce not in (None, "each", "once"):
        fix = 'write "each" (microbatch) or "once" (per step)'
        raise Refused(Problem(f"reduce={reduce!r} is no time to reduce gradients", fix))
    if zero < 2 and reduce == "each":
        fix = 'write zero=2, which shards gradients, or leave reduce="each" out'
        raise Refused(Problem(f"zero={zero} keeps gradients whole: they are reduced once", fix))
    if zero == 2 and reduce == "once":
        fix = "write zero=1, which keeps gradients whole until they are reduced"
        raise Refused(Problem("gradients that are reduced once are not sharded before", fix))


def refuse_count(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise Refused(Problem(f"{name}={value!r}", f"write a number, {least} or more"))


def refuse_stream(stream: str, example: str = 'reduce_stream="dp"') -> None:
    if not isinstance(stream, str) or not stream:
        raise Refused(Problem(f"stream {stream!r} is no name", f"write {example}"))
    if stream in RESERVED:
        raise Refused(
            Problem(
                f"the stream {stream!r} is Piper's own, nothing else may use it",
                'write another name, such as "dp"',
            )
        )


def refuse_twice(dag: Dag, regions: Sequence[RegionId] | dict[RegionId, None]) -> None:
    again = [region for region in regions if region in dag.replicated]
    if again:
        raise Refused(
            *(
                Problem(
                    f"{region} is replicated already",
                    "let exactly one `Replicate` match each region",
                )
                for region in again
            )
        )
