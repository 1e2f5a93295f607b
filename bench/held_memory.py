"""What is live at the peak of a step, by size and by where it was allocated, of Piper and a peer.

    piper run -n 4 --share-gpu bench/held_memory.py --row pipeline        (PP=4 1F1B, medium)
    piper run -n 4 --share-gpu bench/held_memory.py --row experts         (EP=4)

Each contender has the process to itself. The allocator's own history tells what was live when. It
does not see what CUDA graphs use again, so look at what is reserved there.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import real_experts
import torch
from gpu_arena import Contender
from real_arena import CHOSEN, RealArena
from real_megatron import Way, megatron

import piper

MIB = 2**20
SITE = Path(__file__).parent.parent / ".peers"
SHOWN = 25
Maker = Callable[[], Contender]
Live = dict[int, tuple[int, Any]]  # address -> bytes, frames


def pipeline(arena: RealArena) -> Iterator[tuple[str, Maker]]:
    size, world = arena.size, arena.world
    model, data = arena.shelf.get(size, world), size.batch(0, size.microbatches)
    strategy = piper.strategies.BUILDERS["1f1b"](pp=world, microbatches=size.microbatches)
    ours: Any = partial(arena.piper, model, strategy, data)
    yield "piper", ours
    yield "piper eager", partial(ours, graphs=False)
    yield "megatron", partial(megatron, arena, model, size, size.microbatches, Way(world))


def experts(arena: RealArena) -> Iterator[tuple[str, Maker]]:
    size, parts, world = replace(arena.size, expert_hidden=4096), 4, arena.world
    data, model = size.batch(arena.rank, parts), arena.shelf.get(size, 1, moe=True)
    ours: dict[str, Any] = dict(
        real_experts.pipers(arena, size, data, parts, 1, {"1f1b": 1, "dualpipev": 2})
    )
    for name, make in ours.items():
        yield name, make
        yield f"{name} eager", partial(make, graphs=False)
    for name, grouped in (("megatron", False), ("megatron, our experts", True)):
        way, loss = real_experts.way_of(size, 1, 1, world, grouped), real_experts.logits_loss
        yield name, partial(megatron, arena, model, size, parts, way, loss)


ROWS = {"pipeline": pipeline, "experts": experts}


def peak(events: list[dict[str, Any]], since: int) -> tuple[int, Live]:
    """The most bytes at once from event `since` on, and what they were."""
    live, found, best, now = Live(), Live(), 0, 0
    for k, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], event.get("frames")
            now += event["size"]
            if k >= since and now > best:
                best, found = now, dict(live)
        elif event["action"] == "free_completed" and event["addr"] in live:
            now -= live.pop(event["addr"])[0]
    return best, found


def site(frames: Any) -> str:
    """The innermost line that is not torch's, except for its optimizers."""
    for frame in frames or ():
        name = frame["filename"]
        inside = "/torch/" in name and "/torch/optim" not in name
        if name.endswith(".py") and not inside or name.startswith("<"):
            return f"{'/'.join(name.split('/')[-2:])}:{frame['line']} {frame['name']}"
    return "elsewhere"


def history() -> list[dict[str, Any]]:
    return list(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()])


def measured(arena: RealArena, make: Maker) -> tuple[int, int, Live]:
    """Bytes reserved and live at the peak of a step, and what was live."""
    arena.clean()
    before = torch.cuda.memory_reserved()
    torch.cuda.memory._record_memory_history(max_entries=2 * 10**6, stacks="python")
    one = make()
    for _ in range(CHOSEN):
        one.step()
    arena.fence()
    arena.clean()
    torch.cuda.reset_peak_memory_stats()
    since = len(history())
    one.step()
    arena.fence()
    reserved = torch.cuda.max_memory_reserved() - before
    best, live = peak(history(), since)
    torch.cuda.memory._record_memory_history(enabled=None)
    one.close()
    return reserved, best, live


def text(name: str, reserved: int, best: int, live: Live) -> Iterator[str]:
    yield f"== {name}: live {best / MIB:.1f} MiB, reserved {reserved / MIB:.1f} MiB"
    places = Counter((site(frames), size) for size, frames in live.values())
    for (where, size), n in sorted(places.items(), key=lambda one: -one[0][1] * one[1])[:SHOWN]:
        yield f"{n * size / MIB:9.1f} MiB = {n:3} x {size / MIB:7.2f}  {where}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", choices=ROWS, default="pipeline")
    parser.add_argument("--site", default=str(SITE), help="the folder with the peers' packages")
    parser.add_argument("--match", nargs="*", default=[""], help="only contenders with such names")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    sys.path.insert(0, chosen.site)
    chosen.size, chosen.dtype, chosen.rows, chosen.fused, chosen.out = "medium", None, None, 0, ""
    chosen.patience, chosen.peers_only = 100.0, False
    arena = RealArena(chosen)
    for name, make in ROWS[chosen.row](arena):
        if any(word in name for word in chosen.match):
            arena.watch()
            found = measured(arena, make)
            arena.say("\n".join(text(name, *found)))
            reserved, live = (arena.everywhere(float(bytes)) for bytes in found[:2])
            rows = zip(live, reserved, strict=True)
            arena.say(f"   all ranks: {[f'{a / MIB:.0f} of {b / MIB:.0f}' for a, b in rows]}")
    arena.fence()


if __name__ == "__main__":
    main()
