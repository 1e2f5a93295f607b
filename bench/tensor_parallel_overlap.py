"""What overlap of microbatches gains with tensor parallelism, on emulated devices.

    python bench/links.py -n 2 --rate 16mbit --burst 16kb bench/tensor_parallel_overlap.py
    piper run -n 2 bench/tensor_parallel_overlap.py        (no slow links: what is not messages)

Two ranks on shared cores cannot multiply matrices side by side. So every product of matrices, of
Piper and of torch alike, takes as long as on a device with `--flops` operations per second: its
kernel sleeps. Messages are real. In the first three steps products are computed, and losses
compared; in those that are timed they give zeros.

"piper in turn" runs one pass after the other: only the weight gradients of a layer hide messages.
"piper" is the same order, and messages also hide behind the next microbatch. "piper overlap" is
DualPipeV on one rank. A rank also prints how long its products and its messages alone take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import RESULTS
from gpu_arena import TURNS, Arena, Contender, is_ours
from gpu_models import SIZES, Size
from tensor_parallel import model_of
from tensor_parallel_peers import tensor_parallel
from torch import Tensor

from piper import strategies
from piper.costs import Costs

SIZE = replace(SIZES["links"], dim=64, layers=2, length=64, rows=8, vocab=256)
LIBRARY = torch.library.Library("aten", "IMPL")


class Device:
    """Products take their time on it, once it is on."""

    def __init__(self) -> None:
        self.on, self.flops, self.spent = False, 1e9, 0.0

    def product(self, shape: tuple[int, ...], inner: int, real: Callable[[], Tensor]) -> Tensor:
        if not self.on:
            return real()
        count = 2.0 * inner
        for extent in shape:
            count *= extent
        self.spent += count / self.flops
        time.sleep(count / self.flops)
        return torch.zeros(shape)


DEVICE = Device()


def mm(a: Tensor, b: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[1])
    return DEVICE.product(shape, a.shape[1], lambda: torch.mm(a, b, out=a.new_empty(shape)))


def bmm(a: Tensor, b: Tensor) -> Tensor:
    shape = (*a.shape[:2], b.shape[2])
    return DEVICE.product(shape, a.shape[2], lambda: torch.bmm(a, b, out=a.new_empty(shape)))


def slowed(make: Callable[[], Contender]) -> Contender:
    """Its products are real in the steps whose losses are compared, and then take their time."""
    one, taken = make(), 0

    def step() -> Any:
        nonlocal taken
        taken += 1
        DEVICE.on = taken > TURNS
        try:
            return real()
        finally:
            DEVICE.on = False

    real, one.step = one.step, step
    return one


def contenders(arena: Arena, parts: int) -> dict[str, Callable[[], Contender]]:
    data, whole, halves = arena.size.batch(parts=parts), model_of(arena, 1), model_of(arena, 2)
    how = {"pp": 1, "microbatches": parts, "tp": arena.world}
    ours = {
        "piper in turn": (whole, strategies.one_f_one_b(**how, ahead=False)),
        "piper": (whole, strategies.one_f_one_b(**how)),
        "piper gpipe": (whole, strategies.gpipe(**how)),
        "piper overlap": (halves, strategies.dualpipev(**how)),
    }
    costs = Costs(flops=arena.chosen.flops, link=arena.chosen.link * 125e3)
    make = partial(arena.ours, costs=costs)
    found = {n: partial(make, model, one, data) for n, (model, one) in ours.items()}
    peer = partial(tensor_parallel, arena, whole, data, parts, arena.world)
    found |= {"torch tp, sp": peer, "torch tp": partial(peer, sequence=False)}
    return {name: partial(slowed, make) for name, make in found.items()}


def chosen_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flops", type=float, default=3e8, help="per second, of a device")
    parser.add_argument("--link", type=float, default=16.0, help="Mbit/s, for Piper's costs")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--ways", nargs="*", help="only these contenders")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default=str(RESULTS / "tensor_parallel_overlap"))
    defaults = {"size": "links", "dtype": "fp32", "rows": None, "match": [], "skip": []}
    parser.set_defaults(**defaults, fused=False, patience=600, verbose=True)
    return parser.parse_args()


def main() -> None:
    LIBRARY.impl("mm", mm, "CPU", allow_override=True)
    LIBRARY.impl("bmm", bmm, "CPU", allow_override=True)
    arena = Arena(chosen_options(), group="tensor parallel, overlap")
    arena.size, DEVICE.flops = SIZE, arena.chosen.flops
    makers = contenders(arena, arena.chosen.microbatches)
    ways = arena.chosen.ways or list(makers)
    makers = {name: make for name, make in makers.items() if name in ways}
    others = [name for name in makers if name == "piper in turn" or not is_ours(name)]
    pairs = [(a, b) for a in makers if is_ours(a) for b in others if a != b]
    arena.contest(f"tp={arena.world}, {' '.join(ways)}", makers, pairs)
    steps = len(makers) * (arena.chosen.repeats + 1)
    arena.say(f"products of a step: {DEVICE.spent / steps:.2f} s; a message is {message(SIZE)} B")


def message(size: Size) -> int:
    """Bytes of a hidden state."""
    return size.rows * size.length * size.dim * 4


if __name__ == "__main__":
    main()
