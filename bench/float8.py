"""One GPU: linear layers in float8 beside bfloat16, in step time and in the losses of some steps.

    python bench/float8.py [--modes compiled eager] [--steps 50]
    python bench/float8.py --device cpu --layers 2 --dim 64 --hidden 128 --time 16 --steps 3

The model is a Llama with the layers of an 8B one. Attention and feed-forward multiply in float8,
the head does not. Masters are fp32. Data are sequences that a model can learn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from common import save

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy

POLICIES: dict[str, piper.Precision] = {
    "bf16": piper.Precision(),
    "fp8": piper.Precision(fp8=["blocks.*.attention", "blocks.*.feed_forward"]),
}
MODES: dict[str, dict[str, Any]] = {
    "compiled": {"compiled": True, "graphs": False},
    "eager": {"graphs": False},
}
Batch = tuple[torch.Tensor, torch.Tensor]


def batch(chosen: argparse.Namespace, step: int) -> Batch:
    """Each token is the one before it, times 3, plus a number of the row; some are noise."""
    draw = torch.Generator().manual_seed(step)
    rand = partial(torch.randint, generator=draw)
    start, add = rand(chosen.vocab, (chosen.rows, 1)), rand(16, (chosen.rows, 1))
    columns = [start]
    for _ in range(chosen.time):
        columns.append((3 * columns[-1] + add) % chosen.vocab)
    tokens = torch.cat(columns, 1)
    noise = rand(chosen.vocab, tokens.shape)
    tokens = torch.where(rand(10, tokens.shape) == 0, noise, tokens).to(chosen.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model(chosen: argparse.Namespace) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab=chosen.vocab, dim=chosen.dim, layers=chosen.layers, hidden=chosen.hidden,
        heads=max(2, chosen.dim // 128),
    )  # fmt: skip
    with torch.device(chosen.device):
        return Llama(config, stages=chosen.layers)


def run(chosen: argparse.Namespace, name: str, mode: str) -> dict[str, Any]:
    on_gpu = chosen.device == "cuda"
    example = batch(chosen, 0)
    trainer = piper.Trainer(
        model(chosen), cross_entropy, piper.Strategy([piper.Place(piper.where(), [0])]),
        example=example, optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=True),
        precision=POLICIES[name], device=chosen.device, **MODES[mode],
    )  # fmt: skip
    losses, times = [], []
    for step in range(chosen.steps):
        given = batch(chosen, step)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses.append(float(trainer.step(*given).loss))
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    trainer.close()
    del trainer
    if on_gpu:
        torch.cuda.empty_cache()
    return {"losses": losses, "seconds": times, "peak": peak}


def summary(found: dict[str, Any]) -> str:
    losses, last = found["losses"], found["losses"][-5:]
    ms = 1e3 * statistics.median(found["seconds"][min(5, len(losses) - 1) :])
    return (
        f"{ms:8.1f} ms  peak {found['peak'] / 2**30:5.1f} GiB  losses {losses[0]:.4f} "
        f"{losses[len(losses) // 2]:.4f} {losses[-1]:.4f}, mean of the last {len(last)}: "
        f"{statistics.mean(last):.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--modes", nargs="+", default=list(MODES), choices=MODES)
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=4096)
    add("--hidden", type=int, default=14336)
    add("--vocab", type=int, default=512)
    add("--rows", type=int, default=4)
    add("--time", type=int, default=4096)
    add("--steps", type=int, default=50)
    chosen = parser.parse_args()
    results: dict[str, Any] = {"settings": vars(chosen)}
    for mode in chosen.modes:
        for name in POLICIES:
            results[f"{name}, {mode}"] = found = run(chosen, name, mode)
            print(f"{name + ', ' + mode:16} {summary(found)}", flush=True)
            save("float8", results)


if __name__ == "__main__":
    main()
