"""Group of bench/gpu.py: the speed of all-gathers and reduce-scatters, by how a group is made.

A message has the bytes of a layer of the size. Messages follow each other as in a step with ZeRO-1,
alone or beside products on the compute stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_arena import Arena

LAYERS = 4  # messages of a turn
Way = Callable[[Callable[[bool], Any]], Callable[[], object]]


def collectives(arena: Arena) -> None:
    count = layer_size(arena)
    groups = made(arena)
    for beside in (False, True) if arena.on_gpu else (False,):
        for kind in ("all-gather", "reduce-scatter"):
            found = {}
            for name, (group, wrapped) in groups.items():
                arena.watch()
                step = wrapped(messages(arena, kind, group, count))
                found[name] = timed(arena, step, beside)
            label = f"{kind}{', beside products' if beside else ''}"
            arena.keep(label, found)
            best = {name: 1e3 * statistics.median(times) for name, times in found.items()}
            arena.say(f"{label}: " + ", ".join(f"{n} {ms:.1f} ms" for n, ms in best.items()))


def layer_size(arena: Arena) -> int:
    """Elements of one layer, a multiple of the ranks."""
    block = arena.shelf.get(arena.size, 1).cuts[0].blocks[0]
    return sum(p.numel() for p in block.parameters()) // arena.world * arena.world


def made(arena: Arena) -> dict[str, tuple[Any, Way]]:
    """Groups of all ranks, and how a message is started in each."""
    backend = "cpu:gloo,cuda:nccl" if arena.on_gpu else None
    fresh, met = (dist.new_group(backend=backend) for _ in range(2))
    meeting = torch.zeros(arena.world, device=arena.device)
    dist.all_to_all_single(torch.empty_like(meeting), meeting, group=met)
    found: dict[str, tuple[Any, Way]] = {
        "default group": (None, asynchronous),
        "new group": (fresh, asynchronous),
        "new group after an all-to-all": (met, asynchronous),
    }
    if arena.on_gpu:
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        urgent = dist.new_group(backend=backend, pg_options=options)
        found["high priority"] = (urgent, asynchronous)
        found["default group, on a stream of high priority"] = (None, on_stream())
    return found


def asynchronous(start: Callable[[bool], Any]) -> Callable[[], object]:
    """As Piper starts messages."""

    def step() -> None:
        for work in [start(True) for _ in range(LAYERS)]:
            work.wait()

    return step


def on_stream() -> Way:
    """As FSDP2 does."""
    stream = torch.cuda.Stream(priority=-1)

    def wrapped(start: Callable[[bool], Any]) -> Callable[[], object]:
        def step() -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(LAYERS):
                    start(False)
            torch.cuda.current_stream().wait_stream(stream)

        return step

    return wrapped


def messages(arena: Arena, kind: str, group: Any, count: int) -> Callable[[bool], Any]:
    """Gathers in bf16, reductions in fp32."""
    if kind == "all-gather":
        whole = torch.zeros(count, device=arena.device, dtype=torch.bfloat16)
        part = whole.new_zeros(count // arena.world)
        return lambda later: dist.all_gather_into_tensor(whole, part, group=group, async_op=later)
    whole = torch.zeros(count, device=arena.device)
    part = whole.new_zeros(count // arena.world)
    return lambda later: dist.reduce_scatter_tensor(part, whole, group=group, async_op=later)


def timed(arena: Arena, step: Callable[[], object], beside: bool) -> list[float]:
    matrix = torch.zeros(2048, 2048, device=arena.device, dtype=torch.bfloat16) if beside else None
    times = []
    for turn in range(2 + arena.chosen.repeats):
        arena.fence()
        started = time.perf_counter()
        step_and_products(step, matrix)
        arena.fence()
        if turn >= 2:
            times.append(time.perf_counter() - started)
    return times


def step_and_products(step: Callable[[], object], matrix: torch.Tensor | None) -> None:
    if matrix is not None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                torch.mm(matrix, matrix)
    step()
