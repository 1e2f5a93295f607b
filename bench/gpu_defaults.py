"""What each default brings, beside the same without it: groups of bench/gpu.py.

    python bench/gpu.py --group joined --size large
    piper run -n 4 --share-gpu bench/gpu.py --group receives --size large

- `joined`: compiled regions one by one, and joined over their borders.
- `receives`: receives posted early or late, point-to-point communicators with few or many CTAs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_peers import pipelined, plain
from torch.profiler import ProfilerActivity, profile

import piper
from piper.names import Share
from piper.plan.analyse import kernel_sequences
from piper.plan.lower import device_work
from piper.runtime.comm import nccl

Maker = Callable[[], Contender]


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def made_under(changes: list[tuple[Any, str, Any]], make: Maker) -> Contender:
    with patched(*changes):
        return make()


def joined(arena: Arena) -> None:
    """One device with a region per layer: eager, compiled one by one, joined, torch.compile."""
    parts = arena.chosen.microbatches or 4
    size = replace(arena.size, length=2 * arena.size.length)
    data = size.batch(parts=parts)
    model = arena.shelf.get(size, 1, layered=True)
    strategy = [piper.Place(piper.where(), [0]), piper.Split("MB", parts)]
    ours: Any = partial(arena.ours, model, strategy, data)
    compiled = partial(ours, compiled=True)
    makers: dict[str, Any] = {
        "piper": ours,
        "eager": partial(plain, arena, model, data, parts),
        "piper compiled apart": partial(made_under, [(kernel_sequences, "MOST", 1)], compiled),
        "piper compiled": compiled,
        "torch.compile": partial(plain, arena, model, data, parts, dynamic=False),
    }
    seen: dict[str, dict[str, float]] = {}
    watched = {name: partial(observed, arena, name, make, seen) for name, make in makers.items()}
    arena.contest("joined", watched, more={"observed": seen})


def observed(arena: Arena, name: str, make: Maker, seen: dict[str, Any]) -> Contender:
    """A contender whose kernels and memory in a step are noted first."""
    one = make()
    one.first = arena.losses(one)
    if arena.on_gpu:
        arena.fence()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one.step()
        arena.fence()
        most = torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            one.step()
            arena.fence()
        kernels = sum(event.count for event in watched.key_averages() if is_kernel(event))
        seen[name] = {"kernels": kernels, "gib_in_a_step": most / 2**30}
        arena.say(f"  {name}: {seen[name]}")
    return one


def is_kernel(event: Any) -> bool:
    gpu = event.device_type == torch.autograd.DeviceType.CUDA
    return gpu and not event.key.startswith(("Memcpy", "Memset"))


def receives(arena: Arena) -> None:
    """PP=4 1F1B beside torch's."""
    size, parts = arena.size, arena.chosen.microbatches or 8
    data, model = size.batch(parts=parts), arena.shelf.get(size, arena.world)
    strategy = piper.strategies.one_f_one_b(pp=arena.world, microbatches=parts)
    ours: Any = partial(arena.ours, model, strategy, data)
    early = (device_work, "last_moment", lambda work, use, transfer, starts, early: early)
    graphs = partial(ours, graphs=True)
    makers: dict[str, Any] = {
        "torch": partial(pipelined, arena, "1f1b", model, data, parts, arena.world),
        "piper before": partial(made_under, [early, ctas(None)], ours),
        "piper early, 1 CTA": partial(made_under, [early, ctas(1)], ours),
        "piper late, any CTAs": partial(made_under, [ctas(None)], ours),
        "piper late, 1 CTA": partial(made_under, [ctas(1)], ours),
        "piper late, 2 CTAs": partial(made_under, [ctas(2)], ours),
        "piper late, 4 CTAs": partial(made_under, [ctas(4)], ours),
        "piper before, graphs": partial(
            made_under, [early, ctas(None)], partial(ours, graphs=True)
        ),
        "piper late, 1 CTA, graphs": partial(made_under, [ctas(1)], graphs),
    }
    arena.contest("receives", makers)


def ctas(most: int | None) -> tuple[Any, str, Any]:
    def few(share: Share) -> Share:
        return share if most is None else replace(share, sms=most)

    return nccl, "few_ctas", few
