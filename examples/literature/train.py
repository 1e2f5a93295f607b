"""What the strategies of this folder train: a small Llama, or a model of their own."""

from functools import partial

import torch

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy

LAYERS, STEPS = 8, 3


def train(strategy, model=None, loss_fn=cross_entropy, batch=None) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 128, (4 * strategy.microbatches, 16))
    model = model or Llama(LlamaConfig(layers=LAYERS), stages=LAYERS)
    batch = batch or (tokens, tokens)
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    trainer = piper.Trainer(model, loss_fn, strategy, optimizer=optimizer, example=batch)
    for _ in range(STEPS):
        metrics = trainer.step(*batch)
        if trainer.rank == 0:
            print(metrics, flush=True)
