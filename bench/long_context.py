"""Long sequences on four ranks: memory and time of each way to divide tokens, beside torch's own.

    piper run -n 4 --share-gpu bench/long_context.py
    piper run -n 4 --share-gpu bench/long_context.py --lengths 65536 --match torch   (it alone)
    piper run -n 1 bench/long_context.py                 (one device has all tokens)
    PIPER_DEVICE=cpu piper run -n 4 bench/long_context.py --lengths 32 64 128 --size tiny

Ways: all-to-all of heads, a ring, a zigzag, each with one row of tokens in a microbatch; torch's
context parallelism (a ring) with DDP. Each runs alone, one after the other. Memory is the most that
tensors take in a step, on the rank that takes most. It includes what earlier entries left behind,
which is printed: if it is much, start each way and length by itself. Losses of the first steps are
compared. Memory grows in a straight line with the length, so the longest sequence in `--gib`
follows from two lengths.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_models import SIZES
from tensor_parallel_models import Model
from tensor_parallel_peers import context_parallel

from piper import strategies
from piper.models.llama import LlamaConfig

WAYS = {"piper heads": None, "piper ring": "ring", "piper zigzag": "zigzag"}


def model_of(arena: Arena) -> Model:
    size = arena.size
    config = LlamaConfig(vocab=size.vocab, dim=size.dim, layers=size.layers, heads=size.heads)
    return Model(config, size.length, 1).to(arena.dtype)


def contenders(arena: Arena) -> dict[str, Callable[[], Contender]]:
    model, data = model_of(arena), arena.size.batch(parts=1)
    if arena.world == 1:
        one = strategies.one_f_one_b(pp=1, microbatches=1)
        return {"piper, one device": partial(arena.ours, model, one, data)}
    found: dict[str, Callable[[], Contender]] = {}
    for name, way in WAYS.items():
        how: Any = {"cp_attention": way} if way else {}
        divided = strategies.one_f_one_b(pp=1, microbatches=1, cp=arena.world, **how)
        found[name] = partial(arena.ours, model, divided, data)
    return found | {"torch": partial(context_parallel, arena, model, data, 1)}


def measured(arena: Arena, make: Callable[[], Contender]) -> dict[str, Any]:
    """Losses, the most bytes of any rank, and the median time of a step."""
    left = torch.cuda.memory_allocated() if arena.on_gpu else 0
    one = make()
    losses = arena.losses(one, arena.chosen.steps)
    if arena.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(arena.chosen.repeats):
        arena.fence()
        started = time.perf_counter()
        one.step()
        arena.fence()
        times.append(arena.most(time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() if arena.on_gpu else 0
    one.close()
    return {
        "losses": losses,
        "bytes": arena.most(peak),
        "left before": arena.most(left),
        "seconds": statistics.median(times),
    }


def longest(arena: Arena, found: dict[int, dict[str, Any]]) -> int | None:
    """How many tokens fit, if memory goes on as between the two largest lengths."""
    if len(found) < 2:
        return None
    (a, one), (b, other) = sorted(found.items())[-2:]
    each = (other["bytes"] - one["bytes"]) / (b - a)
    return int(b + (arena.chosen.gib * 2**30 - other["bytes"]) / each) if each > 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="*", type=int, default=[16384, 32768])
    parser.add_argument("--gib", type=float, default=32.0, help="memory of a device")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="whose losses are printed first")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--match", nargs="*", default=[], help="only ways whose names have these")
    parser.add_argument("--out")
    parser.set_defaults(rows=1, fused=True, patience=300, skip=[], verbose=True)
    arena = Arena(parser.parse_args(), group="long context")
    known: dict[str, dict[int, dict[str, Any]]] = {}
    for length in arena.chosen.lengths:
        arena.size = replace(arena.size, length=length, layers=arena.chosen.layers)
        ways = {name: make for name, make in contenders(arena).items() if arena.wanted(name)}
        for name, make in ways.items():
            arena.watch()
            found, reason = arena.tried(f"{name}, {length}", partial(measured, arena, make))
            arena.clean()
            if not reason:
                known.setdefault(name, {})[length] = found
                arena.keep(f"{name}, {length} tokens, {arena.world} ranks", found)
                losses = " ".join(f"{loss:.4f}" for loss in found["losses"])
                size = f"{found['bytes'] / 2**30:7.2f} GiB, {found['seconds'] * 1e3:8.1f} ms"
                if found["left before"]:
                    size += f" ({found['left before'] / 2**30:.2f} GiB of it left by others)"
                arena.say(f"{length:7d} tokens  {name:<18} {size}  losses {losses}")
    for name, by_length in known.items():
        if tokens := longest(arena, by_length):
            arena.say(f"{name:<18} longest in {arena.chosen.gib:g} GiB: {tokens} tokens")


if __name__ == "__main__":
    main()
