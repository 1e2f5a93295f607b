"""The directives of a pipeline, from the table of its schedule and the options of its builder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from piper.directives import Directive, Order, Place, Replicate, Shard, Split, Stage, Strategy
from piper.directives.order import Ahead
from piper.directives.replicate import Reduce
from piper.directives.shard import What
from piper.directives.stage import ADAM
from piper.errors import StrategyError
from piper.ir.filters import Filter, where
from piper.ir.placement.division import Attention
from piper.names import PASS, Device, Phase, amount
from piper.strategies.device_mesh import DeviceMesh, Mesh, device_mesh
from piper.strategies.offloaded_stages import OffloadOption, offloads_of
from piper.strategies.peak import stage_peaks
from piper.strategies.recomputed_stages import RematOption, remats_of
from piper.strategies.schedules.table import Action, Table
from piper.strategies.unequal_ranks import Replication, stage_speeds, unequal_homes

LOG = logging.getLogger("piper")
Places = Mapping[int, Sequence[Device]]  # the ranks or devices of each stage, one per replica


def assemble(
    table: Table,
    places: Places,
    pp: int,
    dp: Replication,
    *,
    stages: Sequence[int] | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    replica_sizes: Sequence[int] | None = None,
    memory_gib: float | None = None,
    speeds: Sequence[float] | None = None,
    mesh: Mesh | None = None,
    devices: Sequence[Device] | None = None,
    zero: int = 0,
    reduce: Reduce | None = None,
    bucket_mb: float = 25.0,
    gather_ahead: int = 1,
    gather_buffers: int | None = None,
    tp: int = 1,
    cp: int = 1,
    cp_attention: Attention | None = None,
    ep: int = 1,
    expert_stages: Iterable[int] | None = None,
    ahead: Ahead | None = None,
    remat: RematOption = False,
    offload: OffloadOption = None,
    stream: str = "pp",
    tp_stream: str = "tp",
    cp_stream: str = "cp",
    ep_stream: str = "ep",
    reduce_stream: str = "dp",
    gather_stream: str = "gather",
) -> Strategy:
    """Each stage on its ranks of `dp` pipelines (`tp * cp` devices each), and its directives."""
    require_counts(tp, cp, ep, devices, cp_attention)
    homes = homes_of(places, pp, dp, tp, cp, ep, mesh, devices)
    rest = reduce_stream, gather_stream, gather_ahead, gather_buffers, reduce
    how = Replicate(where(), [0], zero, bucket_mb, *rest)
    return Strategy((
        stage_of(table, stages, memory_gib, zero, homes, stage_speeds(places, pp, dp, speeds)),
        *places_of(homes, stream),
        *replicates_of(homes, how),
        *divisions_of(homes, tp, 1, tp_stream, "weights"),
        *divisions_of(homes, cp, tp, cp_stream, "tokens", cp_attention),
        *shards_of(homes, ep, ep_stream, expert_stages),
        *remats_of(remat, table.stages),
        *offloads_of(offload),
        Split("MB", table.microbatches, microbatch_sizes, replica_sizes),
        *orders_of(table, tp * cp * ep > 1 if ahead is None else ahead),
    ))  # fmt: skip


def pipelines_of(places: Places, ep: int, ways: int) -> int:
    """How many pipelines divide experts together."""
    width = max(map(len, places.values()))  # replicas in one pipeline: two in that of DualPipe
    return max(1, ep // (width * ways))


def replicates_of(homes: Places, how: Replicate) -> Iterator[Replicate]:
    """Each stage that is on several devices, replicated as `how` is."""
    if how.zero and all(len(set(home)) == 1 for home in homes.values()):
        LOG.warning("zero=%d has no effect: every stage has one replica (dp=1)", how.zero)
    for stage in sorted(homes):
        devices = tuple(dict.fromkeys(homes[stage]))
        if len(devices) > 1:
            yield replace(how, filter=where(PP=stage), devices=devices)


def require_counts(
    tp: int, cp: int, ep: int, devices: Sequence[Device] | None, attention: Attention | None
) -> None:
    for name, count in (("tp", tp), ("cp", cp), ("ep", ep)):
        require_count(name, count)
    asked = [f"{name}={n}" for name, n in (("tp", tp), ("cp", cp)) if n > 1]
    if devices is not None and tp * cp > 1:
        what = f"devices lists the places of a mesh, each of which {asked[0]} makes several"
        raise StrategyError.of("strategy", what, "leave out devices")
    if attention and cp == 1:
        what = f'cp_attention="{attention}" has no effect with cp=1'
        raise StrategyError.of("strategy", what, "write cp=2 or more, or leave out cp_attention")


def divisions_of(
    homes: Places, ways: int, stride: int, stream: str, what: What,
    attention: Attention | None = None,
) -> Iterator[Shard]:  # fmt: skip
    """Each `ways` devices of a stage, `stride` apart from each other, divide it."""
    for stage in sorted(homes) if ways > 1 else ():
        devices, size = tuple(homes[stage]), ways * stride
        firsts = (k for k in range(len(devices)) if k % size < stride)
        groups = list(dict.fromkeys(devices[k : k + size : stride] for k in firsts))
        each = groups[0] if len(groups) == 1 else groups
        yield Shard(where(PP=stage), each, stream, what, attention=attention)


def homes_of(
    places: Places,
    pp: int,
    dp: Replication,
    tp: int,
    cp: int,
    ep: int,
    mesh: Mesh | None,
    devices: Sequence[Device] | None,
) -> dict[int, tuple[Device, ...]]:
    """The devices of each stage."""
    if not isinstance(dp, int):
        return unequal_homes(places, dp, pp, devices, tp * cp, mesh=mesh)
    require_count("dp", dp)
    grid = device_mesh(pp, dp, pipelines_of(places, ep, tp * cp), mesh, devices)
    return equal_homes(places, grid, tp * cp)


def equal_homes(places: Places, mesh: DeviceMesh, ways: int) -> dict[int, tuple[Device, ...]]:
    """The devices of each stage, pipeline by pipeline; `ways` of them for each place."""
    return {
        stage: tuple(
            mesh.device(rank, pipeline) * ways + part
            for pipeline in range(mesh.dp)
            for rank in ranks
            for part in range(ways)
        )
        for stage, ranks in places.items()
    }


def stage_of(
    table: Table,
    stages: Sequence[int] | None,
    memory_gib: float | None,
    zero: int,
    homes: Places,
    speeds: tuple[float, ...] | None,
) -> Stage:
    """The cut into stages. A device shares its memory equally among its stages."""
    if stages is not None:
        return Stage("PP", stages_of(stages, table))
    if memory_gib is None:
        return Stage("PP", table.stages, speeds=speeds)
    each = memory_gib * len(table.rows) / table.stages
    replicas = min(len({*home}) for home in homes.values())
    sharded = sum(level <= zero for level in (1, 1, 2, 3))  # two moments, gradients, parameters
    state = ADAM - sharded + sharded / replicas
    return Stage("PP", table.stages, stage_peaks(table), each, state, speeds)


def stages_of(stages: Sequence[int], table: Table) -> Sequence[int]:
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        fix = f"write a list, such as stages={[1] * table.stages}"
        raise StrategyError.of("strategy", f"stages={stages!r} is not a list", fix)
    if len(stages) != table.stages:
        what = (
            f"stages={list(stages)} has {amount(len(stages), 'stage')}, the schedule {table.stages}"
        )
        fix = "write how many layers each stage of the schedule has"
        raise StrategyError.of("strategy", what, fix)
    return stages


def require_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        fix = "write a whole number, 1 or more"
        raise StrategyError.of("strategy", f"{name}={value!r} is not a valid count", fix)


def to_directives(
    table: Table, places: Places, stream: str = "pp", ahead: Ahead = False
) -> tuple[Directive, ...]:
    """The stages, a place for each, the split into microbatches, and an order for each rank."""
    return (
        Stage("PP", table.stages),
        *places_of(places, stream),
        Split("MB", table.microbatches),
        *orders_of(table, ahead),
    )


def places_of(places: Places, stream: str) -> Iterator[Place]:
    return (Place(where(PP=stage), tuple(places[stage]), stream) for stage in sorted(places))


def shards_of(homes: Places, ep: int, stream: str, stages: Iterable[int] | None) -> Iterator[Shard]:
    """Each `ep` consecutive replicas of a stage divide its experts."""
    if ep == 1:
        return
    for stage in sorted(homes if stages is None else stages):
        devices = homes[stage]
        if len(devices) % ep:
            what = f"ep={ep} does not divide the {amount(len(devices), 'device')} of stage {stage}"
            raise StrategyError.of("strategy", what, f"write dp={ep}, or a multiple of it")
        groups = [devices[k : k + ep] for k in range(0, len(devices), ep)]
        yield Shard(where(PP=stage, EP="*"), groups[0] if len(groups) == 1 else groups, stream)


def orders_of(table: Table, ahead: Ahead = False) -> Iterator[Order]:
    """`where(PP=..., MB=..., PASS=...)` for every action.

    Filters share their tags and skip the checks of `where`: there may be 100,000 of them.
    """
    stages = [("PP", stage) for stage in range(table.stages)]
    microbatches = [("MB", microbatch) for microbatch in range(table.microbatches)]
    passes = {phase: (PASS, str(phase)) for phase in Phase}

    def filter_of(action: Action) -> Filter:
        stage, phase, microbatch = action
        return Filter((stages[stage], microbatches[microbatch], passes[phase]))

    for row in table.rows:
        yield Order(tuple(tuple(map(filter_of, slot)) for slot in row), ahead=ahead)
