"""Weak scaling: as many tokens for each device, on more and more of them.

    piper run -n 4 --share-gpu bench/weak_scaling.py      (measured, on 1, 2 or 4 ranks)
    python bench/weak_scaling.py --simulate 8 64 512 4096

Measured: replicas with ZeRO-2, which share one GPU or a few cores, so the ideal is not a constant
time. It is the time of the same work in as many processes that do not talk to each other.
Simulated: the job of bench/scale.py, DeepSeek-V3-like on H800s: DualPipeV with PP=16, the rest
replicas with ZeRO-1 and up to EP=64, 32 microbatches for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from common import RESULTS, interleaved, save
from gpu_arena import DTYPES, Arena
from gpu_models import SIZES
from gpu_peers import plain
from scale import PP, job

import piper

PARTS, TOKENS = 32, 4096  # of a simulated microbatch: one sequence


def simulated(devices: int) -> dict[str, float]:
    tokens = devices // PP * PARTS * TOKENS
    return {"devices": devices, "tokens": tokens, "ms": 1e3 * job(devices, PARTS).step}


def measured(arena: Arena) -> dict[str, float]:
    """A step, and the same microbatches on every rank without messages, in turn."""
    size, parts, devices = arena.size, arena.chosen.microbatches, list(range(arena.world))
    model, data = arena.shelf.get(size, size.layers), size.batch(arena.rank, parts)
    strategy = [
        piper.Place(piper.where(), devices),
        piper.Replicate(piper.where(), devices, zero=2),
        piper.Split("MB", parts),
    ]
    ours, alone = arena.ours(model, strategy, data), plain(arena, model, data, parts)
    steps = {"piper": ours.step, "alone": alone.step}
    times = interleaved(steps, arena.chosen.repeats, warmup=2, fence=arena.fence)
    ours.close()
    found = {name: 1e3 * statistics.median(one) for name, one in times.items()}
    tokens = arena.world * parts * size.rows * size.length
    return {
        "devices": arena.world,
        "tokens": tokens,
        "ms": found["piper"],
        "alone_ms": found["alone"],
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", type=int, nargs="*", help="numbers of devices")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", default="weak_scaling", help="results of other runs stay in it")
    return parser.parse_args()


def keep(out: str, kind: str, found: list[dict[str, Any]]) -> None:
    path = RESULTS / f"{out}.json"  # `out` may be a whole path
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    rows = {one["devices"]: one for one in (*before.get(kind, ()), *found)}
    save(out, {**before, kind: [rows[count] for count in sorted(rows)]})


def main() -> None:
    chosen = options()
    if chosen.simulate is not None:
        found = [simulated(devices) for devices in chosen.simulate]
        print(*found, sep="\n", flush=True)
        keep(chosen.out, "simulated", found)
        return
    arena = Arena(argparse.Namespace(**vars(chosen), fused=False, verbose=False, patience=300.0))
    one = measured(arena)
    arena.say(str(one))
    if arena.rank == 0:
        keep(chosen.out, "measured", [one])


if __name__ == "__main__":
    main()
