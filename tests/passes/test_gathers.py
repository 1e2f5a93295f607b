"""zero=3 by default: parameters are held where that does not raise the peak."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from draws import levels_of, one_of
from metered import captured

from piper.directives import Place, Replicate, Split, Strategy
from piper.ir.filters import where
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.analyse.memory import BUFFERS, peak, timeline
from piper.plan.instructions import Gather, Run
from piper.strategies import BUILDERS

LAYERS = 8  # regions: the embedding, 6 layers, the head
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zbv", "dualpipev")


@cache
def made(schedule: str, reduce: str, buffers: int | None, microbatches: int = 4) -> Compiled:
    options: dict[str, Any] = {"zero": 3, "reduce": reduce, "gather_buffers": buffers}
    if schedule == "replicas":
        devices = [0, 1]
        program = [Place(where(), devices), Split("MB", microbatches)]
        strategy = Strategy([*program, Replicate(where(), devices, **options)])
        return compile_strategy(captured(1, 8)[1].model, strategy.directives)
    strategy = BUILDERS[schedule](pp=2, dp=2, microbatches=microbatches, **options)
    stages = 4 if schedule in SCHEDULES[3:] else 2
    return compile_strategy(captured(stages, 8)[1].model, Strategy(strategy).directives)


def peaks(one: Compiled) -> list[int]:
    return [peak(one.dag, plan, staging=0).total for plan in one.plans]


def gathers(one: Compiled) -> list[int]:
    return [sum(isinstance(i, Gather) for i in plan.instructions) for plan in one.plans]


@one_of(2)
@pytest.mark.parametrize(
    ("schedule", "reduce"), levels_of(["replicas", *SCHEDULES], ["once", "each"], nth=2)
)
def test_it_sends_less_in_the_memory_of_two_buffers(schedule: str, reduce: str) -> None:
    two, more = made(schedule, reduce, 2), made(schedule, reduce, None)

    pairs = list(zip(peaks(two), peaks(more), strict=True))
    assert all(ours <= 1.02 * theirs for theirs, ours in pairs), pairs
    assert all(ours <= theirs for theirs, ours in zip(gathers(two), gathers(more), strict=True))
    assert sum(gathers(more)) < 0.8 * sum(gathers(two))


def test_where_there_is_room_each_layer_is_gathered_once() -> None:
    """Until whole gradients are there, and the activations of a whole microbatch besides."""
    one = made("replicas", "once", None, 2)

    runs, found = 0, list[int]()
    for instruction in one.plans[0].instructions:
        runs += isinstance(instruction, Run)
        found += [runs] if isinstance(instruction, Gather) else []
    in_the_last_backward = [at for at in found if at >= 3 * LAYERS - 1]
    assert len(found) - len(in_the_last_backward) == LAYERS
    assert 0 < len(in_the_last_backward) <= LAYERS - 2


def test_nothing_is_held_between_steps() -> None:
    one = made("replicas", "once", None, 2)

    moments = timeline(one.dag, one.plans[0], staging=0)

    held = [moment.held.get(BUFFERS, 0) for moment in moments]
    assert max(held) > 0 and held[-1] == 0


def test_a_number_of_buffers_is_the_most_at_any_time() -> None:
    one = made("replicas", "once", 3, 2)

    assert len(one.plans[0].buffers) == 3
    largest = max(one.plans[0].buffers)
    moments = timeline(one.dag, one.plans[0], staging=0)
    assert max(moment.held.get(BUFFERS, 0) for moment in moments) <= 3 * largest
