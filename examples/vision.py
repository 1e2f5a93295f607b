"""Train a small vision model on generated pictures, with data parallelism and evaluation.

    piper run examples/vision.py -n 2 --log runs/vision.csv --checkpoint runs/vision

A picture shows a bar: upright, lying or slanted. The model has to tell which.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

import piper

SIZE = 16  # pixels


class Vision(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(1, width), nn.GELU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.stem(pictures)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def pictures(seed: int, rows: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    while True:
        kinds = torch.randint(0, 3, (rows,), generator=draw)
        places = torch.randint(3, SIZE - 3, (rows, 1, 1), generator=draw)
        distances = torch.stack([x - places, y - places, x + y - SIZE - places + SIZE // 2])
        bars = (distances[kinds, torch.arange(rows)].abs() < 2).float()
        yield (bars + torch.randn(bars.shape, generator=draw) / 2).unsqueeze(1), kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, default=2, help="replicas: -n of piper run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log", default="print", help="print, tensorboard, wandb, or a .csv file")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and resume from")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    trainer = piper.Trainer(
        Vision(), nn.functional.cross_entropy,
        piper.strategies.gpipe(pp=1, dp=chosen.dp, microbatches=1, zero=1),
        example=next(pictures(0)), optimizer=partial(torch.optim.AdamW, lr=3e-3), log=chosen.log,
    )  # fmt: skip
    done = trainer.resume(chosen.checkpoint, missing_ok=True) if chosen.checkpoint else 0
    data = islice(pictures(seed=1 + trainer.replica), done, chosen.steps)
    for step, batch in enumerate(data, done + 1):
        trainer.step(batch)
        if chosen.checkpoint and (step % 20 == 0 or step == chosen.steps):
            trainer.save(chosen.checkpoint)
    held_out = trainer.evaluate(islice(pictures(seed=1000 + trainer.replica), 4))
    bars, kinds = next(pictures(seed=2000 + trainer.replica))
    found, wanted = trainer.predict(bars), trainer.gather(kinds)
    trainer.close()
    if trainer.rank == 0:  # the rows of all replicas
        right = found.argmax(-1) == torch.cat(wanted)
        print(f"held out: {held_out}  right: {right.float().mean():.0%}")


if __name__ == "__main__":
    main()
