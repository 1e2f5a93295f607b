"""`graphs="auto"` beside no graphs and graphs, for small and large kernels, on any number of ranks.

    piper run -n 1 bench/graphs_auto.py
    piper run -n 4 --share-gpu bench/graphs_auto.py --zero 3

Goal: "auto" is at most 1.02 times the faster of the other two, with the same losses.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from typing import Any

import torch

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.strategies import gpipe

SIZES = {
    "small": (LlamaConfig(vocab=1024, dim=256, layers=4, heads=4), 64),
    "large": (LlamaConfig(vocab=4096, dim=2048, layers=4, heads=16), 1024),
}
WAYS: tuple[Any, ...] = (False, True, "auto")
BEFORE, TIMED = 14, 20  # "auto" has chosen after ten steps


def seconds(trainer: Any, batch: tuple[torch.Tensor, ...]) -> tuple[float, list[float]]:
    """The median time of a step, and the losses of all steps."""
    times, losses = [], []
    for _ in range(BEFORE + TIMED):
        began = time.perf_counter()
        losses.append(float(trainer.step(*batch).loss))
        times.append(time.perf_counter() - began)
    return statistics.median(times[BEFORE:]), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    wanted = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for name in wanted.sizes:
        config, tokens = SIZES[name]
        found: dict[Any, tuple[float, list[float]]] = {}
        for graphs in WAYS:
            torch.manual_seed(0)
            batch = (torch.randint(config.vocab, (2, tokens)),) * 2
            trainer = piper.Trainer(
                Llama(config), cross_entropy, gpipe(1, 1, dp=ranks, zero=wanted.zero),
                example=batch, graphs=graphs, precision="bf16",
            )  # fmt: skip
            found[graphs] = seconds(trainer, batch)
            rank = trainer.rank
            trainer.close()
        best = min(found[False][0], found[True][0])
        if rank == 0:
            row = ", ".join(f"{way}: {1e3 * found[way][0]:.1f} ms" for way in WAYS)
            apart = max(abs(a - b) for a, b in zip(found[False][1], found["auto"][1], strict=True))
            ratio = found["auto"][0] / best
            print(f"{name}: {row}; auto {ratio:.3f}x of the best, losses differ by {apart:.1e}")


if __name__ == "__main__":
    main()
