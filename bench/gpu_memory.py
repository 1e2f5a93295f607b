"""Groups of bench/gpu.py about memory and host time."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_models import SIZES, Size
from gpu_peers import pipelined, replica

import piper
from piper.capture import capture
from piper.job.compile.compiler import compile_strategy
from piper.plan.analyse.memory import peak

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from memory_meter import Meter  # noqa: E402

PP, SCHEDULE = 2, "1f1b"
Found = dict[str, float]


def memory(arena: Arena) -> None:
    """PP=2 x DP=2: the peak memory of a step, and how many rows fit in a budget."""
    dp, parts = arena.world // PP, arena.chosen.microbatches or 4
    build = piper.strategies.BUILDERS[SCHEDULE]
    makers: dict[str, Callable[[Size], Contender]] = {}
    for zero in (2, 3):
        strategy = build(
            pp=PP, microbatches=parts, dp=dp, zero=zero, reduce="each", gather_buffers=2
        )
        makers[f"piper zero={zero}"] = partial(ours, arena, parts, strategy)
    once = {"reduce": "once", "gather_buffers": arena.size.layers // PP}  # as FSDP2 does
    strategy = build(pp=PP, microbatches=parts, dp=dp, zero=3, **once)
    makers["piper zero=3 once"] = partial(ours, arena, parts, strategy)
    for reshard in (False, True):
        name = f"torch x fsdp2 {'reshard' if reshard else 'keep'}"
        makers[name] = partial(theirs, arena, parts, reshard)
    warm_up(arena)
    budget = arena.chosen.budget_gib * 2**30 if arena.on_gpu else 2 * 2**20
    for name, make in makers.items():
        if arena.wanted(name):
            found, reason = arena.tried(name, partial(largest, arena, make, budget))
            arena.keep(name, found or {"failed": reason})
            if found:
                arena.say(text(name, found, budget))


def warm_up(arena: Arena) -> None:
    """Allocate the workspaces of matrix products, so that they count for no contender."""
    square = torch.ones(64, 64, dtype=arena.dtype, device=arena.device)
    (square @ square).sum().item()


def ours(arena: Arena, parts: int, strategy: Any, size: Size) -> Contender:
    model = arena.shelf.get(size, PP, layered=True)
    return arena.ours(model, strategy, size.batch(replica(arena, PP), parts))


def theirs(arena: Arena, parts: int, reshard: bool, size: Size) -> Contender:
    model = arena.shelf.get(size, PP)
    data = size.batch(replica(arena, PP), parts)
    return pipelined(arena, SCHEDULE, model, data, parts, PP, reshard)


def largest(
    arena: Arena, make: Callable[[Size], Contender], budget: float
) -> dict[str, dict[int, Found] | float]:
    """The most rows that fit.

    Memory grows linearly with the rows of a microbatch, so two measurements predict them. The
    prediction is then measured, too.
    """
    seen: dict[int, Found] = {}
    small, large = arena.size.rows, 3 * arena.size.rows
    for rows in (small, large):
        seen[rows] = measured(arena, make, rows)
    slope = (seen[large]["peak"] - seen[small]["peak"]) / (large - small)
    rows = int((budget - seen[small]["peak"]) / slope) + small
    while rows > 0 and rows not in seen:  # one row less if memory grows a little faster
        seen[rows] = measured(arena, make, rows)
        rows -= seen[rows]["peak"] > budget
    fits = [rows for rows, found in seen.items() if found["peak"] <= budget]
    return {"rows": max(fits, default=0), "slope": slope, "budget": budget, "seen": seen}


def measured(arena: Arena, make: Callable[[Size], Contender], rows: int) -> Found:
    """Peak of the second step (the first makes optimizer state), on the rank that needs most."""
    arena.watch()
    arena.clean()
    before = torch.cuda.memory_allocated() if arena.on_gpu else 0
    one = make(replace(arena.size, rows=rows))
    found = {"peak": arena.most(on_gpu(arena, one, before) if arena.on_gpu else on_cpu(one))}
    if one.trainer is not None:
        found["computed"] = arena.most(computed(arena, one.trainer))
    one.close()
    del one
    arena.clean()
    return found


def on_gpu(arena: Arena, one: Contender, before: int) -> float:
    one.step()
    arena.fence()
    torch.cuda.reset_peak_memory_stats()
    one.step()
    arena.fence()
    return torch.cuda.max_memory_allocated() - before


def on_cpu(one: Contender) -> float:
    outside = one.trainer._job.model.parameters() if one.trainer else ()  # not Piper's
    with Meter(one.lasting, outside) as meter:
        one.step()
        meter.peak = 0
        one.step()
    return meter.peak


def computed(arena: Arena, trainer: piper.Trainer) -> float:
    """The compiler's prediction for the rank that needs most. Only rank 0 knows it.

    NCCL scatters in place, gloo does not.
    """
    staging = 0 if arena.on_gpu else 1
    made = [(one.dag, plan) for one in trainer._programs.made.values() for plan in one.plans]
    return max((peak(dag, plan, staging=staging).total for dag, plan in made), default=0.0)


def text(name: str, found: dict[str, Any], budget: float) -> str:
    rows = [f"{name:28} {found['rows']} rows in {budget / 2**20:.1f} MiB"]
    for count, one in found["seen"].items():
        far = f", computed {one['computed'] / 2**20:.1f}" if "computed" in one else ""
        rows.append(f"  {count} rows: measured {one['peak'] / 2**20:.1f} MiB{far}")
    return "\n".join(rows)


def host(arena: Arena) -> None:
    """Steps with kernels so small that the host is the limit, and the time to compile."""
    world, parts = arena.world, arena.size.microbatches
    size = SIZES["tiny"]
    for name in ("1f1b", "dualpipev") if world > 1 else ("1f1b",):
        arena.watch()
        entry = f"{name}, tiny kernels"
        if not arena.wanted(entry):
            continue
        stages = world * (2 if name == "dualpipev" else 1)
        model, data = arena.shelf.get(size, stages), size.batch(parts=parts)
        strategy = piper.strategies.BUILDERS[name](pp=world, microbatches=parts)
        found = compiling(arena, model, strategy, data, parts)
        mine = arena.ours(model, strategy, data)
        assert mine.trainer is not None
        program = next(iter(mine.trainer._programs.ready.values()))
        count = len(program.plan.instructions)
        makers: dict[str, Any] = {"piper": lambda one=mine: one}
        if world > 1:
            makers["torch"] = partial(pipelined, arena, name, model, data, parts, world)
        steps = arena.contest(entry, makers, more={"instructions": count, **found})
        if "piper" in steps:
            arena.say(f"  {1e6 * steps['piper'] / count:.1f} us per instruction, {count} on rank 0")
    loop(arena)


def compiling(arena: Arena, model: Any, strategy: Any, data: Any, parts: int) -> Found:
    one = tuple(tensor[: tensor.shape[0] // parts] for tensor in data)
    started = time.perf_counter()
    captured = capture(model, model.loss, one, arena.device.type)
    between = time.perf_counter()
    compile_strategy(captured.model, piper.Strategy(strategy).directives)
    found = {"capture_s": between - started, "compile_s": time.perf_counter() - between}
    arena.say(f"  capture {found['capture_s']:.2f} s, compile {found['compile_s']:.2f} s")
    return found


def loop(arena: Arena) -> None:
    """The loop over instructions alone, as in bench/host_time.py."""
    from host_time import loop_alone

    program, batch = loop_alone()
    kinds = [type(one).__name__ for one in program.plan.instructions]
    pairs = zip(program.acts, kinds, strict=True)
    program.acts = [act for act, kind in pairs if kind not in ("Add", "Total", "Update")]
    found = []
    for _ in range(12):
        started = time.perf_counter()
        program.step(batch)
        found.append(1e6 * (time.perf_counter() - started) / len(program.acts))
    each = statistics.median(found[2:])
    arena.say(f"loop alone: {each:.2f} us per instruction ({len(program.acts)})")
    arena.keep("loop alone", {"us_per_instruction": each, "instructions": len(program.acts)})
