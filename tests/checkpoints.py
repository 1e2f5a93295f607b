"""Jobs of the pool that save a run, or go on with one; in float64, as replicas.py has it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from replicas import ADAMW, Net, Run, batches, data, known, optimizer_parts
from shared_capture import using
from torch import nn
from torch.nn import functional

from piper.directives import Place, Split, Strategy
from piper.ir.filters import where
from piper.job.division import feeds_of
from piper.runtime.state.device_state import Part
from piper.trainer import Trainer

ROWS, SAVED = 8, 2  # rows of all replicas; steps before a run is saved
PLACE = [Place(where(), [0])]
HALVING = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


def made(rank: int, name: str, stages: int, text: str, **options: Any) -> tuple[Trainer, Any]:
    """A Trainer of the strategy, and this process's part of every batch."""
    strategy = Strategy.from_json(text)
    feeds = feeds_of(strategy)
    parts = strategy.microbatches * len(feeds.teams)
    model, loss_fn, found = known(rank, name, stages, ROWS // parts)
    mine = [
        tuple(t.chunk(len(feeds.feeds))[feeds.feed(rank)] for t in batch)
        for batch in batches(name, ROWS)
    ]
    options = {"optimizer": ADAMW, **options}
    with using(found):
        return Trainer(model, loss_fn, strategy, example=mine[0], **options), mine


def alone(*middle: nn.Module, **options: Any) -> Trainer:
    """A Trainer of a small model in this process."""
    given = {"example": data()[0], "device": "cpu", "seed": 3, **options}
    return Trainer(Net(*middle), functional.mse_loss, [Split("MB", 2), *PLACE], **given)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = trainer.state_dict()
    assert found is not None
    return {name: tensor.clone() for name, tensor in found.items()}


def save_half(rank: int, name: str, stages: int, text: str, folder: str) -> None:
    trainer, mine = made(rank, name, stages, text)
    for batch in mine[:SAVED]:
        trainer.step(*batch)
    trainer.save(folder)
    trainer.close()


def go_on(rank: int, name: str, stages: int, text: str, folder: str) -> Run:
    trainer, mine = made(rank, name, stages, text)
    assert trainer.resume(folder) == SAVED
    run = Run()
    for batch in mine[SAVED:]:
        run.loss.append(trainer.step(*batch).loss)
    run.parameters = [
        Part(p.name, p.first, p.shape, p.values.clone(), p.order)
        for p in trainer._programs.state.parts()
    ]
    run.optimizer = optimizer_parts(trainer._programs.state)
    trainer.close()
    return run


def refused_there(rank: int, text: str, folder: str) -> str:
    """What a process says that looks for a checkpoint where there is none, or another."""
    trainer, _ = made(rank, "uneven", 2, text)
    try:
        trainer.resume(f"{folder}/{rank}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return "nothing"
