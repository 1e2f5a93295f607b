"""Tensor and context parallelism on four ranks: Piper beside torch's own.

    piper run -n 4 --share-gpu bench/tensor_parallel.py
    python bench/links.py -n 4 --rate 500mbit bench/tensor_parallel.py      (CPU, slowed links)
    PIPER_DEVICE=cpu piper run -n 4 bench/tensor_parallel.py                (CPU, tiny sizes)

Entries: tp=4 beside `parallelize_module` (with and without sequence-parallel norms), the same with
compiled layers and torch's asynchronous tensor parallelism (which needs a GPU for each rank),
tp=2 dp=2 beside FSDP2 on top of that, tp=2 pp=2 beside torch.distributed.pipelining of divided
stages, cp=4 beside torch's context parallelism. Contenders live in the same processes and take
steps in turn. A ratio is Piper's time over the peer's, turn by turn: median and middle half. Losses
of the first steps are compared first. A contender that fails is named and left out: torch's context
parallelism needs a GPU.

"piper" runs one microbatch after the other, with messages that run ahead. "piper overlap" is
DualPipeV on one rank: the forward of a microbatch hides the messages of another's backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common import RESULTS
from gpu_arena import DTYPES, Arena
from gpu_models import SIZES
from tensor_parallel_models import Model
from tensor_parallel_peers import context_parallel, pipelined, tensor_parallel

from piper import Strategy, strategies
from piper.models.llama import LlamaConfig


def model_of(arena: Arena, parts: int) -> Model:
    size = arena.size
    config = LlamaConfig(vocab=size.vocab, dim=size.dim, layers=size.layers, heads=size.heads)
    return Model(config, size.length, parts).to(arena.dtype)


def ours(arena: Arena, data: Any, parts: int, stages: int = 1, **how: int) -> dict[str, Any]:
    """Piper, with and without CUDA graphs, one after the other and overlapped."""
    found: dict[str, Any] = {}
    plain = model_of(arena, stages)
    strategy: Strategy = strategies.one_f_one_b(pp=stages, microbatches=parts, **how)
    found |= arena.both(plain, strategy, data)
    twice = model_of(arena, 2 * stages)
    overlapped = strategies.dualpipev(pp=stages, microbatches=parts, **how)
    return found | arena.both(twice, overlapped, data, "piper overlap")


def entries(arena: Arena, parts: int) -> dict[str, Callable[[], dict[str, Any]]]:
    whole, halves = model_of(arena, 1), model_of(arena, 2)
    one, mine = arena.size.batch(parts=parts), arena.size.batch(arena.rank // 2, parts)
    world = arena.world

    def alone() -> dict[str, Any]:
        peer = partial(tensor_parallel, arena, whole, one, parts, world)
        peers = {"torch tp, sp": peer, "torch tp": partial(peer, sequence=False)}
        return ours(arena, one, parts, tp=world) | peers

    def compiled() -> dict[str, Any]:
        peer = partial(tensor_parallel, arena, whole, one, parts, world)
        strategy = strategies.one_f_one_b(pp=1, microbatches=parts, tp=world)
        return {
            "piper": partial(arena.ours, whole, strategy, one),
            "piper compiled": partial(arena.ours, whole, strategy, one, compiled=True),
            "torch tp, sp, compiled": partial(peer, compiled=True),
            "torch tp, sp, asynchronous": partial(peer, asynchronous=True),
        }

    def replicas() -> dict[str, Any]:
        peer = partial(tensor_parallel, arena, whole, mine, parts, 2)
        return ours(arena, mine, parts, tp=2, dp=2, zero=1) | {"torch tp x fsdp2": peer}

    def stages() -> dict[str, Any]:
        peer = partial(pipelined, arena, halves, one, parts, 2, 2)
        return ours(arena, one, parts, 2, tp=2) | {"torch tp x pipelining": peer}

    def tokens() -> dict[str, Any]:
        peer = partial(context_parallel, arena, whole, one, parts)
        return ours(arena, one, parts, cp=world) | {"torch cp": peer}

    return {
        f"tp={world}": alone,
        f"compiled, tp={world}": compiled,
        "tp=2 dp=2": replicas,
        "tp=2 pp=2": stages,
        f"cp={world}": tokens,
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, help="by default medium on a GPU, tiny on a CPU")
    add("--dtype", choices=DTYPES, help="of weights; by default bf16 on a GPU, fp32 on a CPU")
    add("--rows", type=int, help="of a microbatch, if not those of the size")
    add("--microbatches", type=int, default=4)
    add("--repeats", type=int, default=7)
    add("--match", nargs="*", default=[], help="only entries whose names contain one of these")
    add("--skip", nargs="*", default=[], help="no entries whose names contain one of these")
    add("--fused", action="store_true", help="AdamW(fused=True) for all")
    add("--patience", type=float, default=240.0, help="seconds without progress before it ends")
    add("--out", default="", help="file of results; by default one named after the machine")
    add("--verbose", action="store_true", help="whole tracebacks of contenders that fail")
    return parser.parse_args()


def main() -> None:
    arena = Arena(options())
    arena.group = "tensor parallel"
    arena.out = arena.chosen.out or str(RESULTS / f"tensor_parallel_{arena.machine()}")
    arena.say(f"{arena.machine()}, {arena.world} rank(s), {arena.size}, {arena.dtype}")
    started = time.perf_counter()
    for entry, makers in entries(arena, arena.chosen.microbatches).items():
        if arena.wanted(entry):
            arena.contest(entry, makers())
    arena.say(f"took {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
