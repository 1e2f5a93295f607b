"""A small model that every strategy of this folder trains."""

from functools import partial

import torch

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy

LAYERS, STEPS = 8, 3


def train(strategy: piper.Strategy) -> None:
    torch.manual_seed(0)
    rows = 2 * strategy.microbatches
    tokens = torch.randint(0, 128, (rows, 16))
    trainer = piper.Trainer(
        Llama(LlamaConfig(layers=LAYERS), stages=LAYERS),
        cross_entropy,
        strategy,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        example=(tokens, tokens),
    )
    for _ in range(STEPS):
        metrics = trainer.step(tokens, tokens)
        if trainer.rank == 0:
            print(metrics, flush=True)
