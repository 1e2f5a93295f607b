"""One device: the peak memory of a step, Piper's beside plain eager training of the same model.

    python bench/one_device_memory.py [--cases bf16 autocast] [--layers 16]

Goal: no more than plain eager, and computed within 3 % before the run. A GPU is asked through
its allocator. On a CPU the models are small and every tensor is counted.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import save

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.plan.analyse.memory import peak

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from memory_meter import Meter  # noqa: E402

PARTS, STEPS, MIB = 4, 3, 2**20
ON_GPU = torch.cuda.is_available()
KIND = "cuda" if ON_GPU else "cpu"
ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class Mixed(torch.nn.Module):
    """A model in float32 that computes in bfloat16."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(KIND, torch.bfloat16):
            return self.model(tokens)


@dataclass(frozen=True)
class Case:
    """A model and its batch, on the device that trains it."""

    config: LlamaConfig
    rows: int
    tokens: int
    stages: int
    dtype: torch.dtype
    mixed: bool

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        with torch.device(KIND):
            made = Llama(self.config, stages=self.stages).to(self.dtype)
        return Mixed(made) if self.mixed else made

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        first, second = torch.randint(self.config.vocab, (2, self.rows, self.tokens), device=KIND)
        return first, second


def cases(layers: int) -> dict[str, Case]:
    if not ON_GPU:
        small = LlamaConfig(vocab=2048, dim=128, layers=min(layers, 4), heads=4, hidden=352)
        return {
            f"fp32, {stages} region(s)": Case(small, 8, 128, stages, torch.float32, False)
            for stages in (1, small.layers)
        }
    large = LlamaConfig(vocab=32768, dim=2048, layers=layers, heads=16, hidden=5632)
    return {
        "bf16": Case(large, 16, 2048, 1, torch.bfloat16, False),
        "bf16, a region per layer": Case(large, 16, 2048, layers, torch.bfloat16, False),
        "autocast": Case(large, 8, 2048, 1, torch.float32, True),
    }


@dataclass
class Taken:
    """A way to train: its step, what it holds between steps, and what is not its own."""

    step: Callable[[], Any]
    held: Callable[[], list[torch.Tensor]]
    others: list[torch.Tensor]
    computed: int = 0
    close: Callable[[], object] = lambda: None


def eager(case: Case) -> Taken:
    model, batch = case.model(), case.batch()
    optimizer = ADAMW(model.parameters())

    def step() -> float:
        total = torch.zeros((), device=KIND)
        for tokens, labels in zip(*(tensor.chunk(PARTS) for tensor in batch), strict=True):
            loss = cross_entropy(model(tokens), labels) / PARTS
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return Taken(step, lambda: [*model.parameters(), *state(optimizer)], list(batch))


def ours(case: Case) -> Taken:
    model, batch = case.model(), case.batch()
    strategy = [piper.Place(piper.where(), [0]), piper.Split("MB", PARTS)]
    trainer = piper.Trainer(
        model, cross_entropy, strategy, optimizer=ADAMW, example=batch, graphs=False
    )
    (made,) = trainer._programs.made.values()
    computed = peak(made.dag, made.plans[0], staging=0)
    print(computed, flush=True)

    def held() -> list[torch.Tensor]:
        states = trainer._programs.state.buckets.values()
        optimizers = [one.optimizer for one in states if one.optimizer is not None]
        return [
            *(t for one in states for t in one.tensors),
            *(t for o in optimizers for t in state(o)),
        ]

    def step() -> float:
        return float(trainer.step(*batch).loss)

    others = [*batch, *([] if ON_GPU else model.parameters())]  # on a CPU they have nowhere to go
    return Taken(step, held, others, computed.total, trainer.close)


def state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [one for entry in optimizer.state.values() for one in entry.values()]
    return [one for one in kept if isinstance(one, torch.Tensor)]


def measured(make: Callable[[], Taken]) -> dict[str, float]:
    before = memory_now()
    one = make()
    losses = [one.step() for _ in range(STEPS - 1)]
    meter = nullcontext() if ON_GPU else Meter(one.held(), one.others)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    with meter:
        losses.append(one.step())
    found = torch.cuda.max_memory_allocated() - before if ON_GPU else meter.peak
    one.close()
    return {"peak": found, "computed": one.computed, "loss": losses[-1]}


def memory_now() -> int:
    gc.collect()
    if not ON_GPU:
        return 0
    torch.cuda.empty_cache()
    square = torch.ones(64, 64, device=KIND, dtype=torch.bfloat16)
    (square @ square).sum().item()  # workspaces count for nobody
    del square
    return torch.cuda.memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--cases", nargs="*", default=[], help="those whose names contain one")
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for name, case in cases(chosen.layers).items():
        if chosen.cases and not any(part in name for part in chosen.cases):
            continue
        plain, mine = measured(partial(eager, case)), measured(partial(ours, case))
        results[name] = {"eager": plain, "piper": mine}
        print(
            f"{name}: eager {plain['peak'] / MIB:.1f} MiB, Piper {mine['peak'] / MIB:.1f} MiB "
            f"({mine['peak'] / plain['peak']:.3f}x), computed {mine['computed'] / MIB:.1f} MiB "
            f"({mine['computed'] / mine['peak'] - 1:+.1%}); losses {plain['loss']:.6f} and "
            f"{mine['loss']:.6f}",
            flush=True,
        )
    save(f"one_device_memory_{KIND}", results)


if __name__ == "__main__":
    main()
