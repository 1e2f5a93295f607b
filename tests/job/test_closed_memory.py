"""A Trainer that is closed and dropped frees its memory, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import torch
from torch import Tensor, nn

from piper import Place, Split, Strategy, Trainer, annotate, where

STRATEGY = Strategy([Place(where(), [0]), Split("MB", 2)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            with annotate("PP", k // 3):
                x = torch.tanh(layer(x))
        return x


def trained() -> list[weakref.ref[Tensor]]:
    """Parameters and optimizer state of a Trainer that has taken steps."""
    rows = torch.randn(2, 4)
    trainer = Trainer(
        Net(), nn.functional.mse_loss, STRATEGY, example=(rows, rows), device="cpu",
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip
    for _ in range(2):
        trainer.step(rows, rows)
    buckets = list(trainer._programs.state.buckets.values())
    held = [tensor for bucket in buckets for tensor in bucket.tensors]
    for bucket in buckets:
        assert bucket.optimizer is not None
        held += [value for row in bucket.optimizer.state.values() for value in row.values()]
    trainer.close()
    return [weakref.ref(tensor) for tensor in held]


def test_a_trainer_that_is_dropped_frees_its_memory_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        found = [one() is not None for one in trained()]
    finally:
        gc.enable()

    assert len(found) > 40
    assert not any(found)
