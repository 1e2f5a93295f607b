"""Measure compute and token all-to-alls in a few rounds of a program, without side effects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from piper.plan.instructions import Exchange, Run, Shape, Update, is_message
from piper.runtime.batch import StepInputs
from piper.runtime.comm.gloo import Tensors
from piper.runtime.execute import Act, Program
from piper.runtime.hardware import settle
from piper.runtime.processes.gathering import everyone
from piper.runtime.processes.wire_format import travels
from piper.runtime.state.device_state import BucketState

T = TypeVar("T")
RegionPhase = tuple[str, str]
Lap = Callable[[], float]  # read when the round is over
TRIES = 5  # of each token all-to-all


@travels
@dataclass
class Measured:
    """Measurements of one device: compute, and latency and speed of token all-to-alls."""

    compute: dict[RegionPhase, list[float]] = field(default_factory=dict)  # seconds of each run
    latency: list[float] = field(default_factory=list)
    streams: dict[str, list[float]] = field(default_factory=dict)  # bytes per second


def measure(program: Program, batch: StepInputs, rounds: int) -> Measured:
    """Run the program for some rounds without its updates, then its token all-to-alls alone."""
    program.each_alone()
    seen = Measured()
    before = [(t, t.clone()) for b in program.state.buckets.values() for t in changing(b)]
    laps: dict[RegionPhase, list[Lap]] = {}
    acts, program.acts = program.acts, list(timed(program, laps))
    try:
        for _ in range(rounds + 1):
            laps.clear()  # only the last round counts
            program.step(batch)
        settle(program.device)
        seen.compute.update((name, [lap() for lap in row]) for name, row in laps.items())
    finally:
        program.acts = acts
        for tensor, value in before:
            tensor.copy_(value)
    for one in distinct(program):
        time_exchange(program, one, seen)
    return seen


def changing(bucket: BucketState) -> tuple[torch.Tensor, ...]:
    """Tensors that a forward may change: buffers, never trained parameters."""
    return () if bucket.trained else bucket.tensors


def timed(program: Program, seen: dict[RegionPhase, list[Lap]]) -> Iterator[Act]:
    """The functions of the program, with timed runs and without updates."""
    for k, one in enumerate(program.plan.instructions):
        if isinstance(one, Run):
            waits = [w for w in one.waits if is_message(program.plan.instructions[w])]
            yield stopwatch(program, waits, program.plain(k, one), seen, one)
        elif isinstance(one, Update):
            yield waiting(program, k)
        else:
            yield program.acts[k]


def waiting(program: Program, k: int) -> Act:
    def act() -> None:
        for w in program.plan.instructions[k].waits:
            program.wait_one(w)

    return act


def stopwatch(
    program: Program, waits: list[int], do: Act, seen: dict[RegionPhase, list[Lap]], run: Run
) -> Act:
    around = on_gpu if program.device.type == "cuda" else on_host

    def act() -> None:
        for w in waits:
            program.wait_one(w)
        seen.setdefault((run.region, run.phase), []).append(around(do))

    return act


def on_host(do: Act) -> Lap:
    started = time.perf_counter()
    do()
    seconds = time.perf_counter() - started
    return lambda: seconds


def on_gpu(do: Act) -> Lap:
    """Time on the GPU, or on the host if launching took longer."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    do()
    end.record()
    return lambda: start.elapsed_time(end) / 1e3


def distinct(program: Program) -> list[Exchange]:
    """One token all-to-all for each group and stream, in the same order on all devices."""
    found: dict[tuple[str, tuple[int, ...]], Exchange] = {}
    for one in program.plan.instructions:
        if isinstance(one, Exchange):
            found.setdefault((one.stream, one.group), one)
    return [found[key] for key in sorted(found)]


def time_exchange(program: Program, one: Exchange, seen: Measured) -> None:
    """Time the predicted tokens, spread evenly, and no tokens, for the latency."""
    ways = len(one.group)
    length = (one.shapes[0][0][0] or 0) // ways * ways
    tokens = tuple(zeros(length, shape, program.device) for shape in one.shapes)
    sent = sum(tensor.nbytes for tensor in tokens) * (ways - 1) / ways
    for _ in range(TRIES):
        nothing = seconds(program, one, tuple(tensor[:0] for tensor in tokens))
        took = seconds(program, one, tokens)
        seen.latency.append(nothing)
        seen.streams.setdefault(one.stream, []).append(sent / max(took - nothing, took / 10))


def zeros(length: int, shape: Shape, device: torch.device) -> torch.Tensor:
    sizes, dtype = shape
    whole = (length, *(size or 0 for size in sizes[1:]))
    return torch.zeros(whole, dtype=getattr(torch, dtype), device=device)


def seconds(program: Program, one: Exchange, tokens: Tensors) -> float:
    ways = len(one.group)
    counts = torch.full((ways,), tokens[0].shape[0] // ways, device=program.device)
    settle(program.device)
    started = time.perf_counter()
    program.comm.exchange(tokens, counts, "counted", one.stream, one.group).wait()
    settle(program.device)
    return time.perf_counter() - started


def gathered(mine: T) -> list[T]:
    """The values of all devices."""
    return everyone(mine, "the measurements of all devices")
