"""Group of bench/gpu.py: the most rows, the longest sequence, the most layers in a given memory.

PP=2 x DP=2, beside torch's pipelining with FSDP2, with and without checkpointed layers; and DP=4,
beside FSDP2 and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import floor
from typing import Any

from gpu_arena import Arena, Contender
from gpu_memory import PP, SCHEDULE, Found, measured, ours, warm_up
from gpu_models import Size
from gpu_peers import fsdp2, pipelined, replica
from gpu_precision import SITE, imported, replicated

import piper

STEPS = {"rows": 1, "length": 256, "layers": PP}  # what varies, and by how much
MOST = {"rows": 48, "length": 32, "layers": 8}  # times the size at the start
ALL = ["activations", "optimizer", "parameters"]
FEW: dict[str, Any] = {"reduce": "each", "gather_buffers": 2}  # as little as possible
OURS: dict[str, dict[str, Any]] = {
    "piper zero=2": {"zero": 2, "reduce": "each"},
    "piper zero=3": {"zero": 3, **FEW},
    "piper zero=3, remat": {"zero": 3, **FEW, "remat": True},
    "piper zero=3, remat, offload": {"zero": 3, **FEW, "remat": True, "offload": ALL},
}
THEIRS: dict[str, dict[str, bool]] = {
    "torch x fsdp2": {"reshard": False},
    "torch x fsdp2 reshard": {"reshard": True},
    "torch x fsdp2 reshard, checkpointed": {"reshard": True, "checkpointed": True},
}
Make = Callable[[Size], Contender]


def room(arena: Arena) -> None:
    """PP=2 x DP=2."""
    parts = arena.chosen.microbatches or 4
    makers: dict[str, Make] = {}
    for name, options in OURS.items():
        build = piper.strategies.BUILDERS[SCHEDULE]
        strategy = build(pp=PP, microbatches=parts, dp=arena.world // PP, **options)
        makers[name] = partial(ours, arena, parts, strategy)
    for name, options in THEIRS.items():
        makers[name] = partial(theirs, arena, parts, options)
    grow(arena, makers)


def room_of_replicas(arena: Arena) -> None:
    """All ranks are replicas, a layer is a region or a unit. Everyone shards all state, and reduces
    for each microbatch. DeepSpeed runs if its packages are there."""
    parts = arena.chosen.microbatches or 4
    makers: dict[str, Make] = {}
    few = replicated(arena, parts, 3, **FEW)
    ways = {"piper zero=3": few, "piper zero=3, remat": [*few, piper.Remat(piper.where())]}
    for name, strategy in ways.items():
        makers[name] = partial(replicas, arena, parts, partial(arena.ours, strategy=strategy))
    peer: Any = partial(fsdp2, arena, parts=parts, reshard=True, each=True)
    makers["fsdp2 reshard, each"] = partial(replicas, arena, parts, peer)
    if SITE.is_dir():
        zero = imported(arena, "real_deepspeed").zero
        peer = partial(zero, arena, parts=parts, stage=3)
        makers["deepspeed zero=3"] = partial(replicas, arena, parts, peer)
    grow(arena, makers)


def replicas(arena: Arena, parts: int, make: Any, size: Size) -> Contender:
    one: Contender = make(
        model=arena.shelf.get(size, size.layers), data=size.batch(arena.rank, parts)
    )
    return one


def grow(arena: Arena, makers: dict[str, Make]) -> None:
    """One number after the other, as far as the budget allows."""
    warm_up(arena)
    budget = arena.chosen.budget_gib * 2**30 if arena.on_gpu else 2**20
    for what in arena.chosen.vary:
        for name, make in makers.items():
            if arena.wanted(name):
                find = partial(largest, arena, make, what, budget)
                found, reason = arena.tried(name, find)
                arena.keep(f"{what}: {name}", found or {"failed": reason})
                arena.shelf.models.clear()  # deep models are large
                if found:
                    arena.say(text(name, what, found))


def theirs(arena: Arena, parts: int, options: dict[str, bool], size: Size) -> Contender:
    model = arena.shelf.get(size, PP)
    data = size.batch(replica(arena, PP), parts)
    return pipelined(arena, SCHEDULE, model, data, parts, PP, **options)


def largest(arena: Arena, make: Make, what: str, budget: float) -> dict[str, Any]:
    """Two measurements predict it, because memory grows linearly. The prediction is measured. If it
    needs more than the budget, the two largest measurements predict again."""
    step, small = STEPS[what], max(getattr(arena.size, what), STEPS[what])
    large, most = small + 2 * max(small, step), MOST[what] * small
    seen: dict[int, Found] = {}

    def measure(value: int) -> float:
        size = replace(arena.size, **{what: value})
        seen[value] = measured(arena, lambda one: make(replace(size, rows=one.rows)), size.rows)
        return seen[value]["peak"]

    first = measure(small)
    slope = (measure(large) - first) / (large - small)
    value = predicted(seen, budget, step, most)
    while value > 0 and value not in seen and measure(value) > budget:
        value = min(predicted(seen, budget, step, most), value - step)
    fits = [value for value, found in seen.items() if found["peak"] <= budget]
    return {"most": max(fits, default=0), "capped": max(fits, default=0) == most,
            "slope": slope, "budget": budget, "seen": seen}  # fmt: skip


def predicted(seen: dict[int, Found], budget: float, step: int, most: int) -> int:
    """The most that fits, by the line through the two largest measurements."""
    (one, low), (two, high) = sorted((value, found["peak"]) for value, found in seen.items())[-2:]
    slope = (high - low) / (two - one)
    return min(two + floor((budget - high) / slope) if slope > 0 else most, most) // step * step


def text(name: str, what: str, found: dict[str, Any]) -> str:
    most, mib = found["most"], 2**20
    peak = f"{found['seen'][most]['peak'] / mib:.1f}" if most else "-"
    return (
        f"{name:36} {'at least ' if found['capped'] else ''}{most} {what} in "
        f"{found['budget'] / mib:.0f} MiB: measured {peak} MiB, {found['slope'] / mib:.2f} MiB each"
    )
