"""Host time of one more layer: Piper's step against torch's own loop, on one CPU device.

    python bench/layer_slope.py

Layers are so small that a step is nothing but calls. Times are CPU seconds, and the least of all
turns counts, so that other processes matter little. The slope is that of a line through all depths.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from common import interleaved, save
from models import batch

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy

DEPTHS, ROWS, LENGTH, TURNS = (4, 8, 16, 32), 4, 8, 30
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def config_of(layers: int) -> LlamaConfig:
    return LlamaConfig(vocab=64, dim=16, layers=layers, heads=2)


def loop(layers: int):
    """Forward, backward and optimizer, as one writes them without Piper."""
    config = config_of(layers)
    model, (tokens, labels) = Llama(config, stages=1), batch(config, ROWS, LENGTH)
    optimizer = ADAMW(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(layers: int, regions: int):
    config = config_of(layers)
    data = batch(config, ROWS, LENGTH)
    trainer = piper.Trainer(
        Llama(config, stages=regions), cross_entropy, [piper.Place(piper.where(), [0])],
        optimizer=ADAMW, example=data,
    )  # fmt: skip
    return lambda: trainer.step(*data).loss


def slope(times: dict[int, float]) -> float:
    """Microseconds for each layer, by least squares."""
    depth = sum(times) / len(times)
    mean = sum(times.values()) / len(times)
    above = sum((k - depth) * (t - mean) for k, t in times.items())
    return 1e6 * above / sum((k - depth) ** 2 for k in times)


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[int, float]] = {"torch": {}, "one region": {}, "region per layer": {}}
    for layers in DEPTHS:
        steps = {
            "torch": loop(layers),
            "one region": ours(layers, 1),
            "region per layer": ours(layers, layers),
        }
        times = interleaved(steps, TURNS, clock=time.process_time)
        for name, seconds in times.items():
            found[name][layers] = min(seconds)
    slopes = {name: slope(times) for name, times in found.items()}
    for name, each in slopes.items():
        figures = ", ".join(f"{k}: {1e3 * t:.2f}" for k, t in found[name].items())
        times_of_torch = each / slopes["torch"]
        print(f"{name:17} {each:6.0f} us per layer ({times_of_torch:.3f}x; ms by depth {figures})")
    save("layer_slope", {"us_per_layer": slopes, "seconds": found})


if __name__ == "__main__":
    main()
