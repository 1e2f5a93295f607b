"""Where a step with experts waits: group `waits` of bench/gpu.py.

The all-to-alls of a device run one after the other. Between two of them the network waits for rows
that are still being computed, or, once they are ready, for the host to send them. On a GPU, an
all-to-all ends here when its rows are sorted; the next one may have started by then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from expert_peers import Groups
from gpu_arena import Arena, Contender
from gpu_experts import OURS, PP, balanced_size, ours
from gpu_peers import replica

from piper.runtime.comm.gloo import TokenAllToAll

SHOWN = (OURS, "piper dualpipev pairs", "piper 1f1b")


@dataclass(frozen=True)
class Exchange:
    """Seconds since the step began: rows ready, sent by the host, arrived."""

    way: str
    ready: float
    sent: float
    there: float


@dataclass
class Watch:
    """When all-to-alls happen. On a GPU, their ends are events that are read later."""

    begun: float
    base: Any  # event at the start; None on a CPU, where a message ends with its call
    seen: list[tuple[str, float, float, Any]] = field(default_factory=list)

    def exchanges(self) -> list[Exchange]:
        return [self.exchange(*one) for one in self.seen]

    def exchange(self, way: str, ready: float, sent: float, event: Any) -> Exchange:
        ready, sent = ready - self.begun, sent - self.begun
        if event is None:
            return Exchange(way, ready, ready, sent)
        return Exchange(way, ready, sent, self.base.elapsed_time(event) / 1e3)


def now(on_gpu: bool) -> Any:
    if not on_gpu:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def watched(on_gpu: bool) -> Iterator[Watch]:
    """Record every all-to-all of this process. Its thread calls it when rows are ready."""
    base = now(on_gpu)
    if on_gpu:
        torch.cuda.synchronize()
    watch, plain = Watch(time.perf_counter(), base), TokenAllToAll.__call__

    def call(self: TokenAllToAll) -> tuple[Any, ...]:
        ready = time.perf_counter()
        found = plain(self)
        watch.seen.append((self.way, ready, time.perf_counter(), now(on_gpu)))
        return found

    TokenAllToAll.__call__ = call  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        TokenAllToAll.__call__ = plain  # type: ignore[method-assign]


def divided(exchanges: Sequence[Exchange], total: float) -> dict[str, float]:
    """Where the time of a step goes, as the network sees it.

    >>> step = [Exchange("out", 1.0, 1.5, 3.0), Exchange("back", 2.0, 2.5, 4.0)]
    >>> divided(step, 5.0)
    {'for compute': 1.0, 'for the host': 0.5, 'transfers': 2.5, 'after the last': 1.0}
    """
    compute = host = transfers = free = 0.0
    for one in exchanges:
        compute += max(0.0, one.ready - free)
        could = max(one.ready, free)
        host += max(0.0, min(one.sent, one.there) - could)
        transfers += max(0.0, one.there - max(one.sent, free))
        free = max(free, one.there)
    return {
        "for compute": compute,
        "for the host": host,
        "transfers": transfers,
        "after the last": total - free,
    }


def peaks(arena: Arena) -> dict[str, list[float]]:
    """Peak bytes of each rank in this step. Memory of CUDA graphs counts all the time."""
    return {
        "allocated": arena.everywhere(torch.cuda.max_memory_allocated()),
        "reserved": arena.everywhere(torch.cuda.max_memory_reserved()),
    }


def waits(arena: Arena) -> None:
    parts = arena.chosen.microbatches or arena.size.microbatches
    groups = Groups(PP, arena.world // PP)
    size, found = balanced_size(arena, parts, groups)
    data = size.batch(replica(arena, PP), parts)
    for name in SHOWN:
        if arena.wanted(name):
            arena.watch()
            one = ours(arena, size, data, parts, found, name)
            tell(arena, name, *one_step(arena, one))
            one.close()
            arena.clean()


def one_step(arena: Arena, one: Contender) -> tuple[float, list[Exchange]]:
    for _ in range(3):
        one.step()
    arena.fence()
    if arena.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with watched(arena.on_gpu) as watch:
        started = time.perf_counter()
        one.step()
        arena.fence()
        total = time.perf_counter() - started
    return total, watch.exchanges()


def tell(arena: Arena, name: str, total: float, exchanges: list[Exchange]) -> None:
    times = {key: arena.everywhere(s) for key, s in divided(exchanges, total).items()}
    memory = peaks(arena) if arena.on_gpu else {}
    arena.keep(name, {"total_s": total, "exchanges": len(exchanges), **times, **memory})
    arena.say(f"{name}: {1e3 * total:.0f} ms; the network of each rank, in ms:")
    for key, seconds in times.items():
        arena.say(f"  {key:15}" + "".join(f"{1e3 * s:8.0f}" for s in seconds))
    for key, sizes in memory.items():
        arena.say(f"  {key:15}" + "".join(f"{s / 2**30:8.2f}" for s in sizes) + " GiB")
