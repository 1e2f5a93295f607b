"""A Trainer that is closed and dropped frees its memory, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import torch
from torch import Tensor

from piper import Place, Split, Strategy, Trainer, where
from piper.models.llama import Llama, LlamaConfig, cross_entropy

STRATEGY = Strategy([Place(where(), [0]), Split("MB", 2)])


def trained() -> list[weakref.ref[Tensor]]:
    """Parameters and optimizer state of a Trainer that has taken steps."""
    rows = torch.zeros(2, 4, dtype=torch.long)
    model = Llama(LlamaConfig(layers=2, dim=8, vocab=8, heads=2), stages=2)
    trainer = Trainer(
        model, cross_entropy, STRATEGY, example=(rows, rows), device="cpu",
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
