"""One device: Piper against plain eager training of the same model, in turn, in one process.

    python bench/one_device.py [--compiled]

Goal: at most 1.02x of eager, and less with --compiled.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
from common import interleaved, ratio, save, show
from models import Staged, batch, cross_entropy

import piper
from piper.models.llama import LlamaConfig

SIZES = {
    "small": (128, 4, 64),
    "medium": (256, 4, 128),
    "wide": (512, 2, 128),
}  # dim, layers, length
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def eager_step(model, data, parts: int):
    optimizer = ADAMW(model.parameters())
    chunks = list(zip(*(tensor.chunk(parts) for tensor in data), strict=True))

    def step() -> float:
        total = 0.0
        for tokens, labels in chunks:
            loss = cross_entropy(model(tokens), labels) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in chosen.sizes:
        dim, layers, length = SIZES[name]
        config = LlamaConfig(vocab=1024, dim=dim, layers=layers, heads=4)
        model, data, parts = Staged(config, stages=2), batch(config, 8, length), 4
        strategy = [piper.Place(piper.where(), [0]), piper.Split("MB", parts)]
        plain = copy.deepcopy(model)
        make = partial(piper.Trainer, model, cross_entropy, strategy, optimizer=ADAMW, example=data)
        trainer = make()
        steps = {"piper": partial(trainer.step, *data), "eager": eager_step(plain, data, parts)}
        if chosen.compiled:
            steps["compiled"] = partial(make(compiled=True).step, *data)
        times = interleaved(steps, chosen.repeats)
        for ours in steps.keys() - {"eager"}:
            results[f"{name} {ours}"] = ratio(times, ours, "eager")
            show(f"one device, {name}, {ours} / eager", results[f"{name} {ours}"])
    save("one_device", results)


if __name__ == "__main__":
    main()
