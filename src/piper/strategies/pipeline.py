"""Pipeline strategies: schedules as directives, and the table a strategy's orders make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from piper.directives import Directive, Order, Place, Replicate, Shard, Split, Strategy
from piper.directives.order import Ahead
from piper.errors import Problem, StrategyError, no_option
from piper.ir.filters import Filter, where
from piper.names import PASS, Device, Phase
from piper.strategies import schedules
from piper.strategies.check import check
from piper.strategies.table import Action, Table, ranks_of
from piper.strategies.text import parse_csv

REPLICATE = [field.name for field in fields(Replicate)][2:]  # besides the filter and the devices
OPTIONS = [*REPLICATE, "dp", "ep", "ahead", "stream", "ep_stream", "expert_stages"]
Places = Mapping[int, tuple[Device, ...]]  # the devices of each stage, one per replica


def gpipe(pp: int, microbatches: int, dp: int = 1, **options: Any) -> Strategy:
    """All forwards, then all backwards, of `pp` stages on as many devices.

    Every schedule takes `dp`, the number of replicas: replica r of a stage is r * pp devices
    further. They are kept equal by `Replicate`, which has the other options (`zero` and so on).
    With `ep`, so many replicas in a row share the experts of a stage (regions tagged EP), by
    `Shard`; `expert_stages` are the stages that have any, by default all. While tokens travel, the
    next pass may begin (`ahead` of `Order`, on with `ep` unless it is turned off; "pairs" overlaps
    more, and holds more).

    Streams: `stream` is that of the transfers between stages ("pp"), `ep_stream` that of tokens on
    their way to experts ("ep"), `reduce_stream` ("dp") and `gather_stream` ("gather") are those of
    `Replicate`. What is on one stream runs one after the other.
    """
    return built(schedules.gpipe(pp, microbatches), dp, **options)


def one_f_one_b(pp: int, microbatches: int, dp: int = 1, **options: Any) -> Strategy:
    """One forward, one backward: as fast as GPipe, with fewer live activations.

    >>> print(one_f_one_b(pp=1, microbatches=1))
    Place(filter=where(PP=0), devices=(0,), stream='pp')
    Split(name='MB', n=1)
    Order(slots=((where(PP=0, MB=0, PASS='F'),), (where(PP=0, MB=0, PASS='B'),)))
    """
    return built(schedules.one_f_one_b(pp, microbatches), dp, **options)


def interleaved_one_f_one_b(
    pp: int, microbatches: int, virtual: int = 2, dp: int = 1, **options: Any
) -> Strategy:
    """1F1B of `pp * virtual` stages, stage s on device s % pp."""
    return built(schedules.interleaved_one_f_one_b(pp, microbatches, virtual), dp, **options)


def zb_h1(pp: int, microbatches: int, dp: int = 1, **options: Any) -> Strategy:
    """1F1B whose weight gradients fill a part of the bubble."""
    return built(schedules.zb_h1(pp, microbatches), dp, **options)


def interleaved_zb(
    pp: int, microbatches: int, virtual: int = 2, dp: int = 1, **options: Any
) -> Strategy:
    """ZB-H1 of `pp * virtual` stages, stage s on device s % pp."""
    return built(schedules.interleaved_zb(pp, microbatches, virtual), dp, **options)


def zbv(pp: int, microbatches: int, dp: int = 1, **options: Any) -> Strategy:
    """Zero bubble for `2 * pp` stages, stage s on device min(s, 2*pp - 1 - s)."""
    return built(schedules.zbv(pp, microbatches), dp, **options)


def dualpipev(pp: int, microbatches: int, dp: int = 1, **options: Any) -> Strategy:
    """Overlapped forwards and backwards for `2 * pp` stages, placed as for `zbv`.

    With experts (`ep`), tokens of one pass travel while the other one computes.

    >>> print(dualpipev(pp=1, microbatches=2, dp=2, ep=2, zero=2).directives[4])
    Shard(filter=where(PP=0, EP='*'), devices=(0, 1), stream='ep')
    """
    return built(schedules.dualpipev(pp, microbatches), dp, **options)


def dualpipe(pp: int, microbatches: int, dp: int = 1, **options: Any) -> Strategy:
    """Two replicas of `pp` stages in opposite directions: stage s on devices s and pp-1-s.

    Both are fed one batch, and each takes half of it; `dp` counts such pairs.
    """
    table = schedules.dualpipe(pp, microbatches)
    mirrored = {stage: (stage, pp - 1 - stage) for stage in range(pp)}
    return replicated(table, mirrored, pp, dp, **options)


def from_csv(text: str, stream: str = "pp") -> Strategy:
    """The strategy of a schedule in PyTorch's text, one row per device.

    >>> from_csv("0F0,0B0") == one_f_one_b(pp=1, microbatches=1)
    True
    """
    return from_table(parse_csv(text), stream)


def from_table(table: Table, stream: str = "pp") -> Strategy:
    """The strategy of a schedule, row r on device r; refuses a table that is no schedule."""
    check(table)
    return built(table, stream=stream)


def built(table: Table, dp: int = 1, **options: Any) -> Strategy:
    places = {stage: (rank,) for stage, rank in ranks_of(table).items()}
    return replicated(table, places, len(table.rows), dp, **options)


def replicated(
    table: Table,
    places: Places,
    pp: int,
    dp: int,
    stream: str = "pp",
    ep: int = 1,
    ep_stream: str = "ep",
    expert_stages: Iterable[int] | None = None,
    ahead: Ahead | None = None,
    gather_stream: str = "gather",
    **options: Any,
) -> Strategy:
    """Every place `dp` times, `pp` devices apart, and what keeps the replicas equal."""
    refuse_count("dp", dp)
    refuse_count("ep", ep)
    refuse_unknown(options)
    homes = {
        stage: tuple(device + pp * copy for copy in range(dp) for device in devices)
        for stage, devices in places.items()
    }
    early = ep > 1 if ahead is None else ahead
    where_at, *rest = split_at_places(to_directives(table, homes, stream, early), len(homes))
    several = max(map(len, homes.values())) > 1
    keep = [
        Replicate(where(PP=s), homes[s], gather_stream=gather_stream, **options)
        for s in sorted(homes)
        if several
    ]
    cut = experts(homes, ep, ep_stream, expert_stages)
    return Strategy((*where_at, *keep, *cut, *rest))


def split_at_places(found: tuple[Directive, ...], count: int) -> tuple[Any, ...]:
    return found[:count], *found[count:]


def experts(homes: Places, ep: int, stream: str, stages: Iterable[int] | None) -> Iterator[Shard]:
    """Of the replicas of a stage, each `ep` in a row have its experts together."""
    if ep == 1:
        return
    for stage in sorted(homes if stages is None else stages):
        devices = homes[stage]
        if len(devices) % ep:
            raise StrategyError(
                "strategy",
                Problem(
                    f"ep={ep} does not divide the {len(devices)} replicas of stage {stage}",
                    f"write dp={ep}, or a multiple of it",
                ),
            )
        groups = tuple(devices[k : k + ep] for k in range(0, len(devices), ep))
        yield Shard(where(PP=stage, EP="*"), groups[0] if len(groups) == 1 else groups, stream)


def refuse_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise StrategyError("strategy", Problem(f"{name}={value!r}", "write a number, 1 or more"))


def refuse_unknown(options: Iterable[str]) -> None:
    """Also where there is one replica, which uses none of them."""
    for name in options:
        if name not in OPTIONS:
            raise StrategyError("strategy", no_option("a schedule", name, OPTIONS))


def to_directives(
    table: Table, places: Places, stream: str = "pp", ahead: Ahead = False
) -> tuple[Directive, ...]:
    """A place for each stage, the split in microbatches, and an order for each row."""
    return (
        *(Place(where(PP=stage), tuple(places[stage]), stream) for stage in sorted(places)),
        Split("MB", table.microbatches),
        *orders_of(table, ahead),
    )


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
