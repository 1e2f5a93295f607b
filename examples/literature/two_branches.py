"""A small model whose encoder and decoder meet in one attention."""

from functools import partial

import torch
from torch import Tensor, nn

import piper

VOCAB, DIM, ROWS = 64, 16, 8
torch.manual_seed(0)
SOURCE, TARGET = torch.randint(0, VOCAB, (ROWS, 24)), torch.randint(0, VOCAB, (ROWS, 6))
BATCH = SOURCE, TARGET, TARGET
Block = partial(nn.TransformerEncoderLayer, DIM, 2, 32, dropout=0.0, batch_first=True)


class TwoBranches(nn.Module):
    """Sources and targets -> logits of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.encoder = nn.Embedding(VOCAB, DIM), Block()
        self.write, self.decoder = nn.Embedding(VOCAB, DIM), Block()
        self.cross = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        with piper.annotate("ENC"):
            memory = self.encoder(self.read(source))
        with piper.annotate("DEC"):
            own = self.decoder(self.write(target))
        with piper.annotate("DEC"):
            seen, _ = self.cross(own, memory, memory, need_weights=False)
            return self.head(own + seen)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
