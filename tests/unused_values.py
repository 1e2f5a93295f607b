"""A model with much that no training step uses, and runs of it that are saved and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from piper import Place, Replicate, Split, Strategy, Trainer, where

ONE = Strategy([Place(where(), [0]), Split("MB", 2)])
TWO = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=3)])
X = torch.arange(16.0).view(4, 4) / 16
UNUSED = {"unused", "prior", "mean", "head.weight", "empty"}


class WithMore(nn.Module):
    """A parameter, a frozen one, a buffer and a layer that no training step uses; and tied ones."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.prior = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("empty", torch.randn(0))
        self.register_buffer("table", torch.randn(3), persistent=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.tail = nn.Linear(4, 4, bias=False)
        self.tail.weight = self.head.weight
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.b(self.a(x)))
        return found if self.training else self.tail(found) + self.prior.sum()


def made(strategy: Strategy = ONE, seed: int = 0, model: nn.Module | None = None) -> Trainer:
    given: dict[str, Any] = {"example": (X, X), "device": "cpu"}
    optimizer = torch.optim.Adam
    loss = nn.functional.mse_loss
    return Trainer(model or WithMore(seed), loss, strategy, optimizer=optimizer, **given)


def trained(folder: Path, wait: bool = True) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a run ends with that goes on for two more steps, and its forward."""
    with made() as trainer:
        trainer.step(X, X)
        trainer.save(folder, wait=wait)
        trainer.step(X, X)
        return state(trainer), trainer.predict(X)


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = trainer.state_dict()
    assert found is not None
    return found


def resumed(rank: int, strategy: str, folder: Path, again: Path) -> tuple[Any, Any]:
    """By a model that begins with other values; saved once more before and after the step."""
    with made(Strategy.from_json(strategy), seed=1) as trainer:
        trainer.resume(folder)
        trainer.save(again, wait=False)
        trainer.step(X, X)
        trainer.save(again)
        found, answers = trainer.state_dict(), trainer.predict(X)
        return found, answers
