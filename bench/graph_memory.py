"""What CUDA graphs hold beside a step without them: by pool, segment and gap, on every rank.

    piper run -n 4 --share-gpu bench/graph_memory.py --size medium

One pipeline stage per rank (1F1B). The allocator's own history tells which memory was live when:
that of the default pool in one step, that of the graphs' pool while they were recorded. What a pool
reserves beyond its peak of live memory are gaps.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_arena import DTYPES, Arena
from gpu_models import SIZES

import piper
from piper.runtime.gpu.graph_choice import TIMED, UNTIMED

MIB = 2**20
MODES: dict[str, dict[str, Any]] = {
    "eager": {"graphs": False}, "graphs": {"graphs": True}, "auto": {"graphs": "auto"},
}  # fmt: skip
STEPS = 2 * (UNTIMED + TIMED) + 1  # until the default has chosen
SHOWN = 12  # sizes, and segments


@dataclass
class Pool:
    """The segments of a pool, and what was live in it."""

    segments: list[tuple[int, int]]  # address, bytes
    live: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    at_peak: Counter[int] = field(default_factory=Counter)

    def follow(self, events: list[dict[str, Any]], since: int) -> Pool:
        """The peak of the events from `since` on. Addresses may have had other segments before."""
        made = {e["addr"]: k for k, e in enumerate(events) if e["action"] == "segment_alloc"}
        places = [(start, start + size, made.get(start, 0)) for start, size in self.segments]
        for k, event in enumerate(events):
            address = event["addr"]
            here = any(start <= address < stop and k >= first for start, stop, first in places)
            if event["action"] == "alloc" and here:
                self.live[address] = event["size"]
                now = sum(self.live.values()) if k >= since else 0
                if now > self.peak:
                    self.peak, self.at_peak = now, Counter(self.live.values())
            elif event["action"] == "free_completed":
                self.live.pop(address, None)
        return self

    def found(self) -> dict[str, Any]:
        sizes = sorted((size for _, size in self.segments), reverse=True)
        largest = sorted(self.at_peak.items(), key=lambda one: -one[0] * one[1])[:SHOWN]
        return {
            "reserved": mib(sum(sizes)),
            "peak of live": mib(self.peak),
            "gaps": mib(sum(sizes) - self.peak),
            "small segments": sum(size <= 2 * MIB for size in sizes),
            "segments": dict(Counter(map(mib, sizes)).most_common(SHOWN)),
            "live at the peak": [f"{count} x {mib(size)}" for size, count in largest],
        }


def history(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return list(snapshot["device_traces"][torch.cuda.current_device()])


def mib(size: float) -> float:
    return round(size / MIB, 2)


def pools(snapshot: dict[str, Any]) -> Iterator[tuple[str, Pool]]:
    by_pool: dict[str, list[tuple[int, int]]] = {}
    for segment in snapshot["segments"]:
        name = "default" if tuple(segment["segment_pool_id"]) == (0, 0) else "graphs"
        by_pool.setdefault(name, []).append((segment["address"], segment["total_size"]))
    return ((name, Pool(segments)) for name, segments in by_pool.items())


def measured(arena: Arena, mode: dict[str, Any]) -> dict[str, Any]:
    arena.clean()
    before = torch.cuda.memory_reserved()
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None, stacks="python")
    size, world = arena.size, arena.world
    model, data = arena.shelf.get(size, world), size.batch(0, size.microbatches)
    strategy = piper.strategies.BUILDERS["1f1b"](pp=world, microbatches=size.microbatches)
    one = arena.ours(model, strategy, data, **mode)
    for _ in range(STEPS):
        one.step()
    arena.fence()
    arena.clean()
    held = torch.cuda.memory_reserved() - before
    torch.cuda.reset_peak_memory_stats()
    since = {"default": len(history(torch.cuda.memory._snapshot())), "graphs": 0}
    one.step()
    arena.fence()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    events = history(snapshot)
    found: dict[str, Any] = {
        "peak": mib(torch.cuda.max_memory_reserved() - before),
        "peak of live tensors": mib(torch.cuda.max_memory_allocated()),
        "between steps": mib(held),
        "optimizer": mib(sum(t.nbytes for t in optimizer_state(one.trainer))),
        "lasting": mib(sum(t.nbytes for t in one.lasting)),
        "events": len(events),
    }
    found |= {name: pool.follow(events, since[name]).found() for name, pool in pools(snapshot)}
    one.close()
    return found


def optimizer_state(trainer: Any) -> Iterator[torch.Tensor]:
    for bucket in trainer._programs.state.buckets.values():
        for state in bucket.optimizer.state.values() if bucket.optimizer else ():
            yield from (one for one in state.values() if isinstance(one, torch.Tensor))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    parser.add_argument("--out", help="file of results")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    chosen.rows, chosen.match, chosen.skip, chosen.patience = None, [], [], 100.0
    arena = Arena(chosen)
    arena.group = f"graph memory, {chosen.size}"
    for name in chosen.modes:
        arena.watch()
        mine = measured(arena, MODES[name])
        rows: list[Any] = [None] * arena.world
        torch.distributed.all_gather_object(rows, mine)
        arena.keep(name, rows)
        for rank, row in enumerate(rows):
            arena.say(f"{name}, rank {rank}: {json.dumps(row)}")
    arena.fence()


if __name__ == "__main__":
    main()
