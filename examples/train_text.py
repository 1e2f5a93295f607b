"""Train a small language model on real text with four pipeline stages.

    piper run examples/train_text.py -n 4
    piper run examples/train_text.py -n 4 --schedule dualpipev --steps 50
    piper run examples/train_text.py -n 4 --checkpoint runs/text     # run it again to resume

The text is the source of Python's standard library, byte by byte: every machine has it.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy

EVERY = 25  # steps between checkpoints
TWO_PER_RANK = ("interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1f1b", choices=sorted(piper.strategies.BUILDERS))
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks: -n of piper run")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and resume from")
    return parser.parse_args()


def library_text() -> torch.Tensor:
    """A few megabytes of Python source, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(
    text: torch.Tensor, rows: int, length: int = 64, seed: int = 0
) -> Iterator[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (rows,), generator=generator)
        cuts = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
        yield cuts[:, :-1].contiguous(), cuts[:, 1:].contiguous()


def main() -> None:
    chosen = options()
    stages = chosen.pp * (2 if chosen.schedule in TWO_PER_RANK else 1)
    strategy = piper.strategies.BUILDERS[chosen.schedule](
        pp=chosen.pp, microbatches=chosen.microbatches
    )
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab=256, dim=64, layers=8, heads=4, tied=True), stages)
    data = batches(library_text(), rows=2 * chosen.microbatches)

    trainer = piper.Trainer(
        model, cross_entropy, strategy,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        lr_scheduler=partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=20),
        example=next(data), max_norm=1.0,
    )  # fmt: skip
    folder = chosen.checkpoint
    done = trainer.resume(folder, missing_ok=True) if folder else 0
    for step, batch in enumerate(islice(data, done, chosen.steps), done + 1):
        metrics = trainer.step(*batch)
        if trainer.rank == 0:
            print(metrics, flush=True)
        if folder and step % EVERY == 0:
            trainer.save(folder)


if __name__ == "__main__":
    main()
