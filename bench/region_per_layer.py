"""What a region per layer costs, against one region: the same model on one device, in turn.

    python bench/region_per_layer.py

Goal: at most 1.02x. `host` is so small that a step is nothing but calls. Times are CPU seconds:
other processes on the machine matter less.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from common import interleaved, ratio, save, show
from models import batch

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.plan.analyse import kernel_sequences

SIZES = {"host": (16, 8, 8), "small": (128, 8, 64)}  # dim, layers, length
PARTS, ROWS, TURNS = 8, 16, 40


def step(config: LlamaConfig, length: int, regions: int, most: int):
    """A step of the same model, cut into regions, of which at most `most` are joined."""
    kernel_sequences.MOST_EAGER = most
    torch.manual_seed(0)
    data = batch(config, ROWS, length)
    trainer = piper.Trainer(
        Llama(config, stages=regions),
        cross_entropy,
        [piper.Place(piper.where(), [0]), piper.Split("MB", PARTS)],
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        example=data,
    )
    return lambda: trainer.step(*data).loss


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for name, (dim, layers, length) in SIZES.items():
        config = LlamaConfig(vocab=256, dim=dim, layers=layers, heads=4)
        make = partial(step, config, length)
        steps = {"one": make(1, 1), "apart": make(layers, 1), "joined": make(layers, 64)}
        times = interleaved(steps, TURNS, clock=time.process_time)
        for ours in ("apart", "joined"):
            least = min(times[ours]) / min(times["one"])
            results[f"{name} {ours}"] = {**ratio(times, ours, "one"), "least": least}
            show(f"{name}: {layers} regions, {ours} / one region", results[f"{name} {ours}"])
            print(f"  least times {least:.3f}x", flush=True)
    save("region_per_layer", results)


if __name__ == "__main__":
    main()
