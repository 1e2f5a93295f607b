"""Memory of one device: measured, computed from the plan, and in closed form."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from memory_meter import Meter
from shared_capture import using
from torch import Tensor

from piper.capture import Captured, annotate, capture
from piper.directives import Place, Strategy
from piper.ir.model import Model
from piper.ir.placement.replicas import replicas
from piper.models.llama import Llama, LlamaConfig, cross_entropy, rotary_tables
from piper.plan.analyse.memory import Peak, peak
from piper.plan.buffer_layout import ALIGNED
from piper.trainer import Trainer

VOCAB, LENGTH = 64, 16


class Layered(Llama):
    """Every layer a region of its own, inside its stage."""

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_tables(self.config, tokens, self.embedding.weight.dtype)
        with annotate("PP", 0), annotate("L", 0):
            x = self.embedding(tokens)
        for k, block in enumerate(self.blocks):
            with annotate("PP", self.stage(k)), annotate("L", k + 1):
                x = block(x, cos, sin)
        with annotate("PP", self.stages - 1), annotate("L", self.config.layers + 1):
            return self.head(self.norm(x))


def build(stages: int) -> Layered:
    torch.manual_seed(0)
    return Layered(LlamaConfig(vocab=VOCAB, dim=32, heads=2, layers=6), stages=stages)


@cache
def captured(stages: int, rows: int) -> tuple[Layered, Captured]:
    model, tokens = build(stages), torch.zeros(rows, LENGTH, dtype=torch.int64)
    return model, capture(model, cross_entropy, (tokens, tokens))


def measure(rank: int, stages: int, rows: int, text: str) -> tuple[int, list[Peak], Model | None]:
    """The most bytes that tensors held in a step; on device 0, what the compiler says of all."""
    strategy = Strategy.from_json(text)
    model, found = captured(stages, rows) if rank == 0 else (build(stages), None)
    feeds = replicas(place.devices for place in strategy if isinstance(place, Place)).feeds
    parts = strategy.microbatches * len(feeds[0])
    tokens = torch.arange(rows * parts * LENGTH).view(-1, LENGTH) % VOCAB
    with using(found):
        trainer = Trainer(
            model, cross_entropy, strategy, example=(tokens, tokens), optimizer=torch.optim.AdamW
        )
    state = trainer._programs.state
    states = [tensor for bucket in state.buckets.values() for tensor in bucket.tensors]
    states += [buffer.flat for buffer in state.buffers.values()]
    outside = [tokens, *model.parameters(), *model.buffers()]  # looked at, and not Piper's
    with Meter(states, outside) as meter:
        trainer.step(tokens, tokens)  # the first one makes the optimizer's state
        meter.peak = 0
        trainer.step(tokens, tokens)
    computed = [
        peak(made.dag, plan)
        for made in trainer._programs.made.values()
        for plan in made.device_plans
    ]
    trainer.close()
    return meter.peak, computed, found.model if found else None


def closed_form(
    model: Model, stage: int, n: int, zero: int, alive: int, once: bool = False
) -> float:
    """Of 1F1B, for Adam: parameters, optimizer, gradients, gather buffers, live activations.

    While a layer runs backward, its gradients are there besides; with zero=2 and 3 those of the
    layer before it are on their way as well, in two copies on gloo, unless all are reduced `once`.
    """
    regions = [region for region in model.regions if dict(region.tags).get("PP") == stage]
    sizes = [parameters(model, region) for region in regions]
    whole, layer = sum(sizes), max(sizes)
    shards = n if zero else 1
    once = once or zero < 2
    gradients = whole if once else whole / n
    buffers = {0: 0, 1: whole, 2: whole, 3: 2 * (layer + ALIGNED)}[zero]
    moving = layer + (0 if once else 2 * layer)
    return 3 * whole / shards + gradients + buffers + alive * kept(model, regions) + moving


def parameters(model: Model, region: Any) -> int:
    return sum(spec.nbytes for name in region.buckets for spec in model.buckets[name].specs)


def kept(model: Model, regions: list[Any]) -> int:
    """What a microbatch keeps for its backward: saved values, and inputs that are read again."""
    again = {region.inputs[k] for region in regions for k in region.backward_inputs}
    values = model.values
    inputs = sum(values[name].nbytes for name in again if not name.startswith("batch"))
    return inputs + sum(spec.nbytes for region in regions for spec in region.saved)
