"""Train in processes on a batch that the number of microbatches does not divide."""

from __future__ import annotations

import torch
from replicas import ADAMW, batches, build

from piper import Trainer
from piper.strategies import one_f_one_b


def train(rank: int, rows: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of one of two devices."""
    model, loss_fn = build("uneven", 2)
    data = batches("uneven", rows)
    strategy = one_f_one_b(pp=2, microbatches=2)
    trainer = Trainer(model, loss_fn, strategy, optimizer=ADAMW, example=data[0])
    losses = [trainer.step(*batch).loss for batch in data]
    found = losses, trainer.state_dict()
    trainer.close()
    return found
