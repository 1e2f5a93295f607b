"""Stages are cut where the schedule's clock says that a step is fastest, as the simulator finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from draws import every, one_of
from synthetic import chain

from piper import Stage, Strategy
from piper.costs import Costs
from piper.ir.model import Model
from piper.ir.values import TensorSpec, Value
from piper.job.compile.compiler import compile_strategy
from piper.job.compile.pricing import price
from piper.names import BI, BW, B, F
from piper.strategies import BUILDERS, one_f_one_b
from piper.strategies.cut_clock import turns
from piper.strategies.cut_search import best_cut, even_cut, falling_cut
from piper.strategies.cuts import cut, seconds_of

FAST = Costs(flops=6e14, memory=4e12, link=4e11, latency=5e-6, add=1e-12, update=2e-12, ahead=True)
SLOW = replace(FAST, flops=2e14)
VIRTUAL = ("interleaved-1f1b", "interleaved-zb", "looped-bfs")


def layered(weights: Sequence[float]) -> Model:
    """Layers of so many TFLOPs in each forward."""
    found = chain(len(weights))
    regions = tuple(
        replace(
            region,
            code=f"layer {k}",
            tags=(("L", k),),
            flops={F: w * 1e12, B: 2 * w * 1e12, BI: w * 1e12, BW: w * 1e12},
        )
        for k, (region, w) in enumerate(zip(found.regions, weights, strict=True))
    )
    sent = Value((TensorSpec((2, 2**20)),))
    values = {key: sent if key.startswith("h") else one for key, one in found.values.items()}
    return replace(found, regions=regions, values=values)


def model(random: Random) -> Model:
    """Equal layers, often with a light first and a heavy last one, sometimes all different."""
    layers = random.randint(8, 20)
    weights = [1.0] * layers
    if random.random() < 0.3:
        weights = [random.uniform(0.5, 2) for _ in weights]
    weights[0] *= random.uniform(0.5, 1.2)
    weights[-1] *= random.uniform(1, 4)
    return layered(weights)


def stage_of(strategy: Strategy) -> Stage:
    return next(one for one in strategy if isinstance(one, Stage))


def drawn(random: Random) -> Strategy:
    name = random.choice(sorted(BUILDERS))
    pp = random.choice((2, 4) if name == "dualpipe" else (2, 3, 4))
    options = {"virtual": 2} if name in VIRTUAL else {}
    if random.random() < 0.25:
        options["dp"] = 2
    return BUILDERS[name](pp=pp, microbatches=2 * pp * random.choice((1, 2)), **options)


def step(model: Model, strategy: Strategy, sizes: Sequence[int], costs: Costs) -> float:
    """Seconds, by the simulator."""
    by_hand = [replace(d, stages=tuple(sizes)) if isinstance(d, Stage) else d for d in strategy]
    return price(compile_strategy(model, by_hand, costs=costs)).seconds


@one_of(2)
@pytest.mark.parametrize("seed", every(24, range(120)))
def test_no_cut_is_slower_than_an_even_one_or_the_most_equal_one(seed: int) -> None:
    random = Random(seed)
    found, strategy = model(random), drawn(random)
    stage, costs = stage_of(strategy), random.choice((Costs(), FAST, SLOW))
    layers = len(found.regions)
    if stage.count > layers:
        return

    chosen, _ = cut(stage, found, costs, strategy.directives)

    equal, _ = stage.cut(found, seconds_of(found, costs))
    others = {even_cut(layers, stage.count), tuple(equal.stages)}  # type: ignore[arg-type]
    fastest = min(step(found, strategy, sizes, costs) for sizes in others)
    assert step(found, strategy, chosen.stages, costs) <= 1.005 * fastest  # type: ignore[arg-type]


def test_stages_that_begin_first_get_more() -> None:
    """The largest stage is the same in both cuts. Where it is first, the others drain faster."""
    found, strategy = layered([1.0] * 15 + [1.9]), one_f_one_b(pp=4, microbatches=8)
    room = one_f_one_b(pp=4, microbatches=8, memory_gib=1.0)

    without, _ = cut(stage_of(strategy), found, FAST, strategy.directives)
    limited, _ = cut(stage_of(room), found, FAST, room.directives)

    assert limited.stages == (5, 4, 4, 3)
    first = stage_of(strategy).cut(found, seconds_of(found, FAST))[0].stages
    assert step(found, strategy, limited.stages, FAST) < step(found, strategy, first, FAST)  # type: ignore[arg-type]
    assert without.stages[0] == 4, "the first stage holds four microbatches"  # type: ignore[index]


def test_a_limit_of_memory_holds() -> None:
    found = layered([1.0] * 15 + [1.9])
    for gib in (1.0, 0.075, 0.0626):
        strategy = one_f_one_b(pp=4, microbatches=8, memory_gib=gib)
        stage = stage_of(strategy)
        chosen, model = cut(stage, found, FAST, strategy.directives)
        memory = replace(stage, stages=4).memory(found, [[r] for r in found.regions])
        assert memory is not None and memory.fits(chosen.stages)  # type: ignore[arg-type]
        assert len(model.regions) == 16


def test_stages_on_slower_kinds_of_devices_get_less() -> None:
    found, strategy = layered([1.0] * 16), one_f_one_b(pp=4, microbatches=8)
    mixed = replace(FAST, kinds=(((0, 1), FAST), ((2, 3), SLOW)))

    chosen, _ = cut(stage_of(strategy), found, mixed, strategy.directives)

    assert chosen.stages == (6, 6, 2, 2)
    times = [step(found, strategy, s, mixed) for s in (chosen.stages, (4, 4, 4, 4))]  # type: ignore[arg-type]
    assert times[0] < 0.6 * times[1]


def test_a_stage_is_as_slow_as_its_slowest_replica() -> None:
    found, strategy = layered([1.0] * 16), one_f_one_b(pp=2, microbatches=8, dp=2)
    devices = {one.filter.items[0][1]: one.devices for one in strategy if hasattr(one, "devices")}
    slow = devices[1][1]
    kinds = ((tuple(d for d in range(4) if d != slow), FAST), ((slow,), SLOW))

    chosen, _ = cut(stage_of(strategy), found, replace(FAST, kinds=kinds), strategy.directives)

    assert chosen.stages == (12, 4)


def test_speeds_that_are_said_count_instead_of_kinds() -> None:
    found = layered([1.0] * 16)
    mixed = replace(FAST, kinds=(((0,), FAST), ((1,), SLOW)))
    strategy = one_f_one_b(pp=2, microbatches=16, speeds=[1, 3])

    chosen, _ = cut(stage_of(strategy), found, mixed, strategy.directives)

    assert chosen.stages == (4, 12)


def test_ranks_with_more_devices_get_more_also_of_other_kinds() -> None:
    """Two slow devices for the first stage, four fast ones for the second: six times as fast."""
    found = layered([1.0] * 14)
    mixed = replace(FAST, kinds=(((0, 1), SLOW), ((2, 3, 4, 5), FAST)))
    strategy = one_f_one_b(pp=2, microbatches=16, dp=[2, 4])

    chosen, _ = cut(stage_of(strategy), found, mixed, strategy.directives)

    assert turns({0: (0, 1), 1: (2, 3, 4, 5)}) == [2.0, 1.0]
    assert chosen.stages == (2, 12)


def test_a_search_stops_and_keeps_what_is_as_good() -> None:
    tried = []

    def seconds(sizes: tuple[int, ...]) -> float:
        tried.append(sizes)
        return abs(sizes[0] - 7) + 1.0

    assert best_cut((2, 10), [], seconds, 10, lambda sizes: True) == (7, 5)
    assert best_cut((2, 10), [], seconds, 10, lambda sizes: sizes[0] < 5) == (4, 8)
    tried.clear()
    best_cut((2, 10), [], seconds, 10**6, lambda sizes: True)
    assert len(tried) == 5
    assert best_cut((2, 10), [(3, 9)], lambda sizes: 1.0, 10, lambda sizes: True) == (2, 10)


def test_falling_cuts_take_all_layers() -> None:
    random = Random(5)
    for _ in range(200):
        weights = [random.uniform(0.1, 3) for _ in range(random.randint(1, 20))]
        speeds = [random.uniform(0.5, 4) for _ in range(random.randint(1, len(weights)))]
        sizes = falling_cut(weights, speeds, random.randint(1, 20))
        assert sum(sizes) == len(weights) and len(sizes) == len(speeds) and min(sizes) > 0
