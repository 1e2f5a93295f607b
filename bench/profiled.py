"""Costs that `simulate --profile` measures, against steps of the same model on this device.

    python bench/profiled.py [--dims 1024 2048] [--tokens 4096] [--how eager compiled]

Regions are measured in steps of two microbatches. Then steps of 2, 4 and 8 microbatches on one
device are predicted and run, in turn. One device has no communication to measure.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from itertools import product
from typing import Any

import torch
from common import interleaved, save

import piper
from piper.job.compile.pricing import price
from piper.job.programs.profiling import profile
from piper.models.llama import Llama, LlamaConfig, cross_entropy

ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)
LENGTH, VOCAB, LAYERS = 512, 8192, 4
PARTS = (2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of a microbatch")
    parser.add_argument("--how", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for dim, tokens, how in product(chosen.dims, chosen.tokens, chosen.how):
        results |= compared(dim, tokens, how, chosen.repeats)
    save(f"profiled_{'cuda' if torch.cuda.is_available() else 'cpu'}", results)


def compared(dim: int, tokens: int, how: str, repeats: int) -> dict[str, Any]:
    trainers = {parts: trainer_of(dim, tokens, parts, how) for parts in PARTS}
    first, batch = trainers[PARTS[0]]
    costs = profile(first, batch, first.compile(batch)[0])
    told = {k: price(one.compile(given)[1], costs).seconds for k, (one, given) in trainers.items()}
    steps = {str(k): partial(one.step, *given) for k, (one, given) in trainers.items()}
    taken = interleaved(steps, repeats, fence=settle)
    found = {}
    for parts in PARTS:
        seen, name = statistics.median(taken[str(parts)]), f"{dim} {tokens} {how} {parts}"
        found[name] = {"predicted": told[parts], "measured": seen, "all": taken[str(parts)]}
        print(
            f"width {dim:5} tokens {tokens:6} {how:8} {parts} microbatches  predicted "
            f"{1e3 * told[parts]:8.2f} ms  measured {1e3 * seen:8.2f} ms "
            f"[{1e3 * min(taken[str(parts)]):.2f}, {1e3 * max(taken[str(parts)]):.2f}]  "
            f"{told[parts] / seen - 1:+.1%}",
            flush=True,
        )
    for one, _ in trainers.values():
        one.close()
    return found


def trainer_of(
    dim: int, tokens: int, parts: int, how: str
) -> tuple[piper.Trainer, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    config = LlamaConfig(vocab=VOCAB, dim=dim, layers=LAYERS, heads=max(1, dim // 64))
    model = Llama(config, stages=2)
    if torch.cuda.is_available():
        model = model.to(torch.bfloat16)
    ids = torch.randint(VOCAB, (parts * max(1, tokens // LENGTH), min(tokens, LENGTH)))
    strategy = [piper.Place(piper.where(), [0]), piper.Split("MB", parts)]
    trainer = piper.Trainer(
        model, cross_entropy, strategy, optimizer=ADAMW, example=(ids, ids),
        compiled="compiled" in how, graphs=False,
    )  # fmt: skip
    return trainer, (ids, ids)


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
