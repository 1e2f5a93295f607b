"""An encoder trained beside a decoder, on different numbers of devices.

    piper show examples/literature/encoder_beside_decoder.py
    piper check examples/literature/encoder_beside_decoder.py --numerics
    piper run examples/literature/encoder_beside_decoder.py -n 3

The encoder reads long sources and has two devices. The decoder reads short targets and has one.
Its own blocks do not need the encoder, so both branches run at the same time. Where they meet, the
decoder's device gets the rows of both encoders, one replica after the other.
"""

from functools import partial

import torch
from torch import Tensor, nn

import piper
from piper import Place, Replicate, Split, where

VOCAB, DIM, SOURCE, TARGET, STEPS, ROWS = 64, 16, 24, 6, 3, 8


class Model(nn.Module):
    """Sources [rows, 24] and targets [rows, 6] -> logits [rows, 6, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM)
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True)
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


STRATEGY = piper.Strategy([
    Place(where(ENC=0), devices=[0, 1]),
    Place(where(DEC="*"), devices=[2]),
    Replicate(where(ENC=0), devices=[0, 1], zero=1),
    Split("MB", 2),
])  # fmt: skip


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    source = torch.randint(0, VOCAB, (ROWS, SOURCE), generator=draw)
    target = torch.randint(0, VOCAB, (ROWS, TARGET), generator=draw)
    trainer = piper.Trainer(
        Model(),
        loss_fn,
        STRATEGY,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        example=(source, target, target),
    )
    for _ in range(STEPS):
        metrics = trainer.step(source, target, target)
        if trainer.rank == 0:
            print(metrics, flush=True)


if __name__ == "__main__":
    main()
