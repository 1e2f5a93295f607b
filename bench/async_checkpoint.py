"""How much slower steps are while a checkpoint is written beside them.

    piper run bench/async_checkpoint.py -n 1 --dim 2048 --layers 16 --folder /tmp/checkpoints

The goal is at most 1.05 times a step without a save.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional

import piper
from piper.models.llama import Llama, LlamaConfig
from piper.runtime.checkpoint.folder import kept_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("dim", 256), ("layers", 4), ("rows", 4), ("length", 256),
                          ("vocab", 4096), ("steps", 20), ("saves", 3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, required=True, help="is made, and removed again")
    parser.add_argument("--device", default=None)
    given = parser.parse_args()
    folder = given.folder / "async-checkpoint"
    trainer, step = trained(given)
    try:
        report(given, trainer, step, folder)
    finally:
        trainer.close()
        if trainer.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def trained(given: argparse.Namespace) -> tuple[piper.Trainer, Callable[[], float]]:
    """A Trainer, and a step that returns its seconds."""
    config = LlamaConfig(
        vocab=given.vocab, dim=given.dim, layers=given.layers, heads=max(given.dim // 64, 1)
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, given.vocab, (given.rows, given.length))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    trainer = piper.Trainer(
        Llama(config), loss, example=(tokens, tokens), device=given.device,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    )  # fmt: skip

    def step() -> float:
        began = time.perf_counter()
        _ = trainer.step(tokens, tokens).loss  # reading it waits for the step
        return time.perf_counter() - began

    return trainer, step


def report(
    given: argparse.Namespace, trainer: piper.Trainer, step: Callable[[], float], folder: Path
) -> None:
    for _ in range(5):
        step()
    trainer.save(folder)  # warm: the folder, the group of processes
    alone = median(step() for _ in range(given.steps))
    print(f"step alone: {alone * 1e3:.1f} ms")
    for _ in range(given.saves):
        began = time.perf_counter()
        trainer.save(folder, wait=False)
        call, during = time.perf_counter() - began, list[float]()
        while writing(trainer) or not during:
            during.append(step())
        total = time.perf_counter() - began
        size = sum(path.stat().st_size for path in (folder / kept_in(folder)[-1].folder).iterdir())
        print(
            f"save of {size / 2**30:.2f} GiB: the call took {call:.3f} s, all of it {total:.1f} s; "
            f"{len(during)} steps beside it, {median(during) * 1e3:.1f} ms: "
            f"{median(during) / alone:.3f} times a step alone, "
            f"{(call + sum(during)) / (len(during) * alone):.3f} with the call"
        )


def writing(trainer: piper.Trainer) -> bool:
    thread = trainer._checkpoints.thread
    return thread is not None and thread.is_alive()


if __name__ == "__main__":
    main()
