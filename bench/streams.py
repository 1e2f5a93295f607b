"""Which streams messages use, and how large they are: step time, and what they cost compute.

    piper run -n 4 --share-gpu bench/streams.py
    PIPER_DEVICE=cpu piper run -n 4 bench/streams.py      (tiny sizes)

PP=2 x DP=2, 1F1B, ZeRO-2 that reduces after every microbatch. Messages of pipelines, gradients and
parameters have streams of their own, or share one. Buckets hold 1, 25 or 100 MB. Contenders take
steps in turn. Then a few steps of each are recorded: they show how much longer the same compute
takes while messages are in flight.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import interleaved, save
from gpu_arena import DTYPES, Arena
from gpu_models import SIZES
from gpu_peers import replica

import piper
from piper.plan.analyse.interference import interference

ONE = {"stream": "all", "reduce_stream": "all", "gather_stream": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "own streams, 25 MB": {},
    "own streams, 1 MB": {"bucket_mb": 1.0},
    "own streams, 100 MB": {"bucket_mb": 100.0},
    "one stream, 25 MB": ONE,
    "one stream, 1 MB": {**ONE, "bucket_mb": 1.0},
}
PP, RECORDED = 2, 3


def made(arena: Arena, options: dict[str, Any]) -> piper.Trainer:
    size, parts = arena.size, arena.chosen.microbatches
    strategy = piper.strategies.BUILDERS["1f1b"](
        pp=PP, microbatches=parts, dp=arena.world // PP, zero=2, reduce="each", **options
    )
    model = arena.shelf.get(size, PP, layered=True)
    one = arena.ours(model, strategy, size.batch(replica(arena, PP), parts))
    assert one.trainer is not None
    return one.trainer


def slowdown(trainer: piper.Trainer, batch: Any) -> list[dict[str, float]]:
    """From recorded steps. Only the first process knows."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.record(Path(folder) / "run.json", RECORDED)
        for _ in range(RECORDED):
            trainer.step(*batch)
        kept = trainer._recording
    if kept.compiled is None:
        return []
    found = interference(kept.compiled.device_plans, kept.traces)
    return [{"messages": p.messages, "runs": p.runs, "slowdown": p.slowdown} for p in found]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--out", default="streams")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    arena = Arena(argparse.Namespace(**vars(chosen), fused=False, verbose=False))
    arena.watch()
    trainers = {name: made(arena, options) for name, options in WAYS.items()}
    batch = arena.size.batch(replica(arena, PP), chosen.microbatches)
    steps = {name: lambda one=one: one.step(*batch).loss for name, one in trainers.items()}
    times = interleaved(steps, chosen.repeats, warmup=2, fence=arena.fence)
    found = {}
    for name, trainer in trainers.items():
        arena.watch()
        seen = slowdown(trainer, batch)
        found[name] = {"ms": 1e3 * statistics.median(times[name]), "slowdown": seen}
        arena.say(f"{name}: {found[name]}")
        trainer.close()
    if arena.rank == 0:
        save(chosen.out, {"world": arena.world, "ways": found})


if __name__ == "__main__":
    main()
