"""A tiny training script for tests of launchers: two or four stages of a small MLP.

--bad-token: step 2 feeds a token that is not in the vocabulary; device 0 meets it.
--forever: never ends by itself; writes its process id to --pids FOLDER.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import piper


class Net(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(stages))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for index, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                x = self.embedding(x) if index == 0 else x
                x = torch.tanh(layer(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--mesh")
    parser.add_argument("--schedule", default="one_f_one_b")
    parser.add_argument("--bad-token", action="store_true")
    parser.add_argument("--forever", action="store_true")
    parser.add_argument("--pids")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (4, 3))
    target = torch.zeros(4, 3, 8)
    sizes = {"pp": chosen.pp, "dp": chosen.dp, "mesh": chosen.mesh}
    strategy = getattr(piper.strategies, chosen.schedule)(**sizes, microbatches=4)
    trainer = piper.Trainer(
        Net(chosen.pp), nn.functional.mse_loss, strategy, example=(tokens, target)
    )
    if chosen.pids:
        (Path(chosen.pids) / str(trainer.rank)).write_text(str(os.getpid()))
    step = 0
    while step < 3 or chosen.forever:
        step += 1
        bad = step == 2 and chosen.bad_token
        if bad and trainer.rank == 0:
            (Path(chosen.pids) / "bad").touch()
        metrics = trainer.step(torch.full_like(tokens, 99) if bad else tokens, target)
    print(f"device {trainer.rank} loss {metrics.loss:.6f}\n", end="", flush=True)


if __name__ == "__main__":
    main()
