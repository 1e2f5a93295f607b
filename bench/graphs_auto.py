"""`graphs="auto"` beside no graphs and graphs, for small and large kernels, on any number of ranks.

    piper run -n 1 bench/graphs_auto.py
    piper run -n 4 --share-gpu bench/graphs_auto.py --zero 3

The three are trained in turn in the same processes, once "auto" has chosen. Goal: "auto" is at
most 1.02 times the faster of the other two, with the same losses.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from common import interleaved, ratio, save

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.strategies import gpipe

SIZES = {
    "tiny": (LlamaConfig(), 8, 5),
    "small": (LlamaConfig(vocab=1024, dim=256, layers=4, heads=4), 64, 60),
    "large": (LlamaConfig(vocab=4096, dim=2048, layers=4, heads=16), 1024, 11),
}  # tokens of a row, turns
WAYS: dict[str, Any] = {"eager": False, "graphs": True, "auto": "auto"}
ON_GPU = torch.cuda.is_available()
BEFORE = 12  # "auto" has chosen after ten steps


class Contender:
    """A Trainer that remembers its losses."""

    def __init__(self, config: LlamaConfig, tokens: int, graphs: Any, zero: int) -> None:
        torch.manual_seed(0)
        self.batch = (torch.randint(config.vocab, (2, tokens)),) * 2
        ranks, self.losses = int(os.environ.get("WORLD_SIZE", "1")), list[float]()
        self.trainer = piper.Trainer(
            Llama(config), cross_entropy, gpipe(1, 1, dp=ranks, zero=zero),
            example=self.batch, graphs=graphs, precision="bf16" if ON_GPU else None,
        )  # fmt: skip

    def step(self) -> None:
        self.losses.append(float(self.trainer.step(*self.batch).loss))


def fence() -> None:
    """All ranks are here, and all GPUs are idle. Uses gloo, which needs no GPU."""
    if ON_GPU:
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def compared(size: str, zero: int) -> dict[str, Any]:
    config, tokens, turns = SIZES[size]
    made = {name: Contender(config, tokens, way, zero) for name, way in WAYS.items()}
    for one in made.values():
        for _ in range(BEFORE):
            one.step()
    times = interleaved({name: one.step for name, one in made.items()}, turns, fence=fence)
    found = {name: ratio(times, "auto", name) for name in ("eager", "graphs")}
    best = min(found, key=lambda name: found[name]["theirs_ms"])
    apart = {
        name: max(abs(a - b) for a, b in zip(made["eager"].losses, one.losses, strict=True))
        for name, one in made.items()
    }
    rank = made["auto"].trainer.rank
    for one in made.values():
        one.trainer.close()
    if rank == 0:
        row = ", ".join(f"{name} {one['theirs_ms']:.2f} ms" for name, one in found.items())
        mine = found[best]
        print(
            f"{size}, zero={zero}: {row}, auto {mine['ours_ms']:.2f} ms; auto "
            f"{mine['median']:.3f}x [{mine['low']:.3f}, {mine['high']:.3f}] of the best ({best}); "
            f"losses apart from eager: graphs {apart['graphs']:.1e}, auto {apart['auto']:.1e}",
            flush=True,
        )
    return {"best": best, "ratios": found, "losses_apart": apart, "rank": rank}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero", type=int, nargs="+", default=[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"])
    wanted = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    results = {
        f"{size} zero={zero}": compared(size, zero) for size in wanted.sizes for zero in wanted.zero
    }
    if all(one["rank"] == 0 for one in results.values()):
        save(f"graphs_auto_{os.environ.get('WORLD_SIZE', '1')}", results)


if __name__ == "__main__":
    main()
