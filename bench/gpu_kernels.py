"""Group of bench/gpu.py: where the time of a step in mixed precision goes, beside FSDP2.

Some steps of each contender of the group `precision` are profiled, on all ranks at once. Rank 0
tells the time of its kernels by kind, how long nothing runs, when messages start and end, and how
much CPU time its threads take. On a CPU, operators take the place of kernels; they are nested, so
this only shows that the script runs.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_memory import warm_up
from gpu_models import Shelf
from gpu_precision import contenders, replicated
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 2
SLOT = 10_000_000  # ns, of the timeline in the results
NAMES = ("piper", "piper graphs", "piper, a message for each layer", "fsdp2")
Span = tuple[int, int]  # from, to, in ns
# The first kind with a part of its name counts.
KINDS: dict[str, tuple[str, ...]] = {
    "all-gather": ("AllGather", "allgather"),
    "reduce-scatter": ("ReduceScatter", "reduce_scatter"),
    "other messages": ("nccl", "c10d", "gloo"),
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "aten::mm", "aten::bmm"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "copies": ("Memcpy", "CatArray", "chunk_cat", "split_with_sizes", "copy", "Copy"),
    "optimizer": ("multi_tensor_apply", "_foreach", "adam"),
    "zeros": ("Memset", "FillFunctor", "zero"),
    "sums": ("reduce_kernel", "softmax", "norm", "sum"),
    "elementwise": ("elementwise", "add", "mul"),
}


@dataclass(frozen=True)
class Kernel:
    """One launch, as the profiler saw it on the device."""

    name: str
    start: int
    end: int

    @property
    def kind(self) -> str:
        found = (kind for kind, parts in KINDS.items() if any(part in self.name for part in parts))
        return next(found, "others")

    @property
    def message(self) -> bool:
        return self.kind in ("all-gather", "reduce-scatter", "other messages")


def kernels(arena: Arena) -> None:
    """All ranks are replicas, as in the group `precision`."""
    size, parts = arena.size, arena.chosen.microbatches or 4
    arena.dtype = torch.bfloat16
    model = Shelf(arena.device, torch.float32).get(size, size.layers)
    data = size.batch(arena.rank, parts)
    warm_up(arena)
    for zero in (level for level in arena.chosen.zero if level):
        makers = contenders(arena, model, data, parts, zero)
        large = replicated(arena, parts, zero, bucket_mb=1024)
        one_message = partial(arena.ours, model, large, data, precision="bf16")
        makers["piper, a message for each layer"] = one_message
        for name in (one for one in makers if one in NAMES and arena.wanted(one)):
            arena.watch()
            found, reason = arena.tried(name, lambda make=makers[name]: profiled(arena, make()))
            arena.keep(f"zero={zero}, {name}", found or {"failed": reason})
            if found:
                arena.say(text(f"zero={zero}, {name}", found))
            arena.clean()


def profiled(arena: Arena, one: Contender, warm: int = 0) -> dict[str, Any]:
    """Of one step, after those that allocate. Without the profiler first, to see what it adds."""
    arena.losses(one)
    for _ in range(warm):
        one.step()
    before = threads()
    alone = timed(arena, one)
    spent = {name: ms - before[name] for name, ms in threads().items() if ms > before[name]}
    kind = ProfilerActivity.CUDA if arena.on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        wall = timed(arena, one)
    one.close()
    found = summary(launched(profiler, arena.on_gpu), STEPS)
    cpu = {name: ms / STEPS for name, ms in sorted(spent.items(), key=lambda pair: -pair[1])}
    return {"step_ms": 1e3 * alone, "profiled_ms": 1e3 * wall, "cpu_ms": cpu, **found}


def threads() -> Counter[str]:
    """Milliseconds of CPU time of this process, by the names of its threads. Linux only."""
    found: Counter[str] = Counter()
    for folder in Path("/proc/self/task").glob("*"):
        name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        user, system = rest.split()[11:13]
        found[name] += 1000 * (int(user) + int(system)) // os.sysconf("SC_CLK_TCK")
    return found


def timed(arena: Arena, one: Contender) -> float:
    arena.fence()
    started = time.perf_counter()
    for _ in range(STEPS):
        one.step()
        arena.fence()
    return (time.perf_counter() - started) / STEPS


def launched(profiler: Any, on_gpu: bool) -> list[Kernel]:
    where = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == where and "gpu_user_annotation" not in event.name()
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def summary(seen: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds of one step."""
    if not seen:
        raise RuntimeError("the profiler saw no kernels")
    count, spent, named = Counter[str](), Counter[str](), defaultdict[str, list[int]](list)
    for kernel in seen:
        count[kernel.kind] += 1
        spent[kernel.kind] += kernel.end - kernel.start
        named[kernel.name[:120]].append(kernel.end - kernel.start)
    each = 1e6 * steps
    messages = union((k.start, k.end) for k in seen if k.message)
    compute = union((k.start, k.end) for k in seen if not k.message)
    both = union([*messages, *compute])
    first, last = both[0][0], both[-1][1]
    largest = sorted(named, key=lambda name: -sum(named[name]))[:40]
    return {
        "kinds": {k: {"launches": count[k] / steps, "ms": spent[k] / each} for k in count},
        "compute busy": length(compute) / each,
        "messages in flight": length(messages) / each,
        "both": (length(compute) + length(messages) - length(both)) / each,
        "nothing": (last - first - length(both)) / each,
        "largest": {name: [len(named[name]) / steps, sum(named[name]) / each] for name in largest},
        "messages": [
            [k.kind, (k.start - first) / 1e6, (k.end - first) / 1e6] for k in seen if k.message
        ],
        "compute in each 10 ms": slots(compute, first, last),
    }


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments, in spans that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(spans: Sequence[Span]) -> int:
    return sum(end - start for start, end in spans)


def slots(spans: Sequence[Span], first: int, last: int) -> list[float]:
    """The share of each slot that the spans fill."""
    filled = [0] * -(-(last - first) // SLOT)
    for start, end in spans:
        for at in range((start - first) // SLOT, -(-(end - first) // SLOT)):
            left = first + at * SLOT
            filled[at] += min(end, left + SLOT) - max(start, left)
    return [round(ns / SLOT, 2) for ns in filled]


def text(name: str, found: dict[str, Any]) -> str:
    rows = [
        f"{name}: {found['step_ms']:.1f} ms ({found['profiled_ms']:.1f} profiled); compute busy "
        f"{found['compute busy']:.1f}, messages {found['messages in flight']:.1f}, both "
        f"{found['both']:.1f}, nothing {found['nothing']:.1f}"
    ]
    rows.append(
        "    CPU: " + ", ".join(f"{n} {ms:.0f}" for n, ms in found["cpu_ms"].items()) + " ms"
    )
    for kind, one in sorted(found["kinds"].items(), key=lambda pair: -pair[1]["ms"]):
        rows.append(f"    {kind:16} {one['launches']:8.1f} launches {one['ms']:9.2f} ms")
    return "\n".join(rows)
