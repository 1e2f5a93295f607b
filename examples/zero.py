"""Two pipeline stages with two replicas each, and a different ZeRO level for each stage.

    piper show examples/zero.py            # the schedule; what every device holds and sends
    piper run examples/zero.py -n 4

The first stage shards optimizer state and gradients (ZeRO-2), the second also parameters (ZeRO-3):
it gathers one layer ahead of use, and holds two layers at once. Every process loads the data of its
own replica.
"""

from functools import partial

import torch
from torch import Tensor, nn

import piper
from piper import Place, Replicate, Split, where
from piper.models.llama import Block, LlamaConfig, cross_entropy, rotary_tables

CONFIG, STAGES, STEPS, ROWS = LlamaConfig(layers=6), 2, 5, 8


class Model(nn.Module):
    """Each layer is a region inside its stage, because ZeRO-3 gathers region by region."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CONFIG.vocab, CONFIG.dim)
        self.blocks = nn.ModuleList(Block(CONFIG) for _ in range(CONFIG.layers))
        self.head = nn.Linear(CONFIG.dim, CONFIG.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_tables(CONFIG, tokens, torch.float32)
        with piper.annotate("PP", 0):
            x = self.embedding(tokens)
        for k, block in enumerate(self.blocks):
            with piper.annotate("PP", k * STAGES // CONFIG.layers), piper.annotate("L", k):
                x = block(x, cos, sin)
        with piper.annotate("PP", STAGES - 1):
            return self.head(x)


STRATEGY = piper.Strategy([
    Place(where(PP=0), devices=[0, 2]),
    Place(where(PP=1), devices=[1, 3]),
    Replicate(where(PP=0), devices=[0, 2], zero=2),
    Replicate(where(PP=1), devices=[1, 3], zero=3, gather_ahead=1, gather_buffers=2),
    Split("MB", 4),
])  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    example = torch.zeros(ROWS, 16, dtype=torch.int64)
    trainer = piper.Trainer(
        Model(),
        cross_entropy,
        STRATEGY,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        example=(example, example),
    )
    data = torch.Generator().manual_seed(trainer.replica)  # different data on every replica
    for _ in range(STEPS):
        tokens = torch.randint(0, CONFIG.vocab, (ROWS, 16), generator=data)
        metrics = trainer.step(tokens, tokens)
        if trainer.rank == 0:
            print(metrics, flush=True)


if __name__ == "__main__":
    main()
