"""The directives of a pipeline, from the table of its schedule and the options of its builder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from piper.directives import Directive, Order, Place, Replicate, Shard, Split, Stage, Strategy
from piper.directives.order import Ahead
from piper.directives.replicate import Reduce
from piper.directives.shard import What
from piper.directives.stage import ADAM
from piper.errors import StrategyError
from piper.ir.filters import Filter, where
from piper.names import PASS, Device, Phase, amount
from piper.strategies.peak import stage_peaks
from piper.strategies.table import Action, Table

Places = Mapping[int, Sequence[Device]]  # the devices of each stage, one per replica


def assemble(
    table: Table,
    places: Places,
    pp: int,
    dp: int,
    *,
    stages: Sequence[int] | None = None,
    memory_mb: float | None = None,
    zero: int = 0,
    reduce: Reduce | None = None,
    bucket_mb: float = 25.0,
    gather_ahead: int = 1,
    gather_buffers: int = 2,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_stages: Iterable[int] | None = None,
    ahead: Ahead | None = None,
    stream: str = "pp",
    tp_stream: str = "tp",
    cp_stream: str = "cp",
    ep_stream: str = "ep",
    reduce_stream: str = "dp",
    gather_stream: str = "gather",
) -> Strategy:
    """Each stage on `dp` times its devices, `pp` apart, and the directives of its replicas.

    With `tp` or `cp`, so many devices side by side take the place of each.
    """
    for name, count in (("dp", dp), ("tp", tp), ("cp", cp), ("ep", ep)):
        require_count(name, count)
    require_one_division(tp, cp, ep)
    ways = tp * cp
    homes = {
        stage: tuple(
            (device + pp * copy) * ways + part
            for copy in range(dp)
            for device in devices
            for part in range(ways)
        )
        for stage, devices in places.items()
    }
    replicates = (
        Replicate(
            where(PP=stage), homes[stage], zero, bucket_mb, reduce_stream, gather_stream,
            gather_ahead, gather_buffers, reduce,
        )
        for stage in sorted(homes)
        if len(homes[stage]) > 1
    )  # fmt: skip
    return Strategy(
        (
            stage_of(table, stages, memory_mb, zero, min(map(len, homes.values()))),
            *places_of(homes, stream),
            *replicates,
            *divisions_of(homes, tp, tp_stream, "weights"),
            *divisions_of(homes, cp, cp_stream, "tokens"),
            *shards_of(homes, ep, ep_stream, expert_stages),
            Split("MB", table.microbatches),
            *orders_of(table, ep * ways > 1 if ahead is None else ahead),
        )
    )


def require_one_division(tp: int, cp: int, ep: int) -> None:
    asked = [f"{name}={n}" for name, n in (("tp", tp), ("cp", cp), ("ep", ep)) if n > 1]
    if len(asked) > 1:
        what = f"{' and '.join(asked)} divide the same stages"
        raise StrategyError.of("strategy", what, f"keep one of them, such as {asked[0]}")


def divisions_of(homes: Places, ways: int, stream: str, what: What) -> Iterator[Shard]:
    """Each `ways` devices side by side divide a stage."""
    for stage in sorted(homes) if ways > 1 else ():
        devices = homes[stage]
        groups = [devices[k : k + ways] for k in range(0, len(devices), ways)]
        yield Shard(where(PP=stage), groups[0] if len(groups) == 1 else groups, stream, what)


def stage_of(
    table: Table, stages: Sequence[int] | None, memory_mb: float | None, zero: int, replicas: int
) -> Stage:
    """The cut into stages. A device shares its memory equally among its stages."""
    if stages is not None:
        return Stage("PP", stages_of(stages, table))
    if memory_mb is None:
        return Stage("PP", table.stages)
    each = memory_mb * len(table.rows) / table.stages
    sharded = sum(level <= zero for level in (1, 1, 2, 3))  # two moments, gradients, parameters
    state = ADAM - sharded + sharded / replicas
    return Stage("PP", table.stages, stage_peaks(table), each, state)


def stages_of(stages: Sequence[int], table: Table) -> Sequence[int]:
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
            what = f"ep={ep} does not divide the {amount(len(devices), 'replica')} of stage {stage}"
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
