"""Where `Stage` cuts: so that a step of the schedule takes as little time as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from piper.costs import Costs
from piper.directives import Directive, Stage, Strategy
from piper.directives.stage import layers_of, retagged
from piper.errors import Refused, StrategyError
from piper.ir.model import Model, Region
from piper.ir.partition.balance import ROUNDING
from piper.names import B, F, RegionId
from piper.strategies.cut_clock import (
    CutClock,
    Homes,
    homes_of_stages,
    kinds_of,
    remats_of_stages,
    said_speeds,
    turns,
)
from piper.strategies.cut_search import Sizes, best_cut, even_cut, falling_cut
from piper.strategies.export import to_table

STAGE = "PP"  # the tag under which a table names stages


def with_cuts(program: Iterable[Directive], model: Model, costs: Costs) -> tuple[Directive, ...]:
    """Every `Stage` with a number of stages says which layers they have.

    What cannot be cut stays as it is: applying it says why.
    """
    every = tuple(program)
    found: list[Directive] = []
    for one in every:
        if isinstance(one, Stage):
            with suppress(Refused):
                one, model = cut(one, model, costs, every)  # noqa: PLW2901
        found.append(one)
    return tuple(found)


def cut(
    stage: Stage, model: Model, costs: Costs, program: Sequence[Directive]
) -> tuple[Stage, Model]:
    """The stage with the number of layers of each, and the model under it.

    The slowest stage takes as little time as possible. Where a table says what runs when, the cut
    is improved by its clock.
    """
    homes, times = homes_of_stages(program, stage), seconds_of(model, costs)
    speeds = speeds_of(stage, model, costs, homes)
    first, _ = replace(stage, speeds=speeds).cut(model, times)
    clock = clock_of(stage, model, costs, program, homes)
    sizes = tuple(first.stages) if isinstance(first.stages, Sequence) else ()
    found = replace(stage, stages=searched(clock, sizes, speeds, times) if clock else sizes)
    return found, retagged(model, stage.name, found.stage_of(model))


def searched(
    clock: CutClock, first: Sizes, speeds: Sequence[float] | None, times: Mapping[RegionId, float]
) -> Sizes:
    """The best cut that the clock finds, from the most equal one, an even one and a falling one."""
    weights = [sum(times[region.id] for region in layer) for layer in clock.layers]
    count, table = clock.stage.count, clock.table
    even = even_cut(len(weights), count)
    falling = falling_cut(weights, speeds or [1.0] * count, table.microbatches)
    passes, has_room = len(clock.passes), room_for(clock, first, even)
    return best_cut(first, (even, falling), clock.seconds, passes, has_room)


def room_for(clock: CutClock, *known: Sizes) -> Callable[[Sizes], bool]:
    """Whether a cut has room: within the limit, or else in what known ones take."""
    memory = clock.stage.memory(clock.model, clock.layers)
    if memory is not None:
        return memory.fits
    most = max(map(clock.fullest, known))
    return lambda sizes: clock.fullest(sizes) <= most * (1 + ROUNDING)


def clock_of(
    stage: Stage,
    model: Model,
    costs: Costs,
    program: Sequence[Directive],
    homes: Homes,
) -> CutClock | None:
    """None where there is nothing to choose, or no table says what runs when."""
    layers = layers_of(model.regions, stage.name)
    if not isinstance(stage.stages, int) or not 1 < stage.stages < len(layers):
        return None
    if stage.name != STAGE or len(homes) < stage.stages:
        return None
    try:
        table = to_table(Strategy(program))
    except StrategyError:
        return None
    if table.stages != stage.stages:
        return None
    return CutClock(table, stage, layers, model, homes, costs, [*remats_of_stages(program, stage)])


def speeds_of(stage: Stage, model: Model, costs: Costs, homes: Homes) -> tuple[float, ...] | None:
    """How fast stages are: as said, or by the kinds of their devices. None: all are equal."""
    if len(homes) < stage.count or not costs.kinds or said_speeds(stage, homes) is not None:
        return None if stage.speeds is None else tuple(stage.speeds)
    kinds = [kinds_of(costs, homes[k]) for k in range(stage.count)]
    whole = {id(one): sum(seconds_of(model, one).values()) for some in kinds for one in some}
    slowest = [max(whole[id(one)] for one in some) for some in kinds]
    return tuple(1 / (turn * time) for turn, time in zip(turns(homes), slowest, strict=True))


def seconds_of(model: Model, costs: Costs) -> dict[RegionId, float]:
    """How long regions take for one microbatch, forward and backward."""
    return {region.id: seconds(model, region, costs) for region in model.regions}


def seconds(model: Model, region: Region, costs: Costs) -> float:
    phases = (F, B) if region.has_backward else (F,)
    return sum(costs.region(model, region, phase) for phase in phases)
