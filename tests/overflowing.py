"""A model whose second step overflows, trained with `on_nan`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

import piper
from piper.errors import InputError

STEPS, BAD = 4, 2  # step BAD makes a NaN


class Net(nn.Module):
    """Region PP1 squares what it gets, which overflows if the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with piper.annotate("PP"):
                x = layer(x * x) if index == 1 else layer(x)
                x = self.norm(torch.tanh(x)) if index == 2 else x
        return x


def model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """In step BAD, the third of four microbatches has a number whose square is infinite."""
    torch.manual_seed(1)
    found = [
        (torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))
        for _ in range(STEPS)
    ]
    found[BAD - 1][0][4, 0] = 1e200
    return found


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def schedule(one: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5)


def plain(skip: bool) -> dict[str, torch.Tensor]:
    """Plain PyTorch with the same microbatches, for BatchNorm's sake."""
    net = model()
    updates = optimizer(net.parameters())
    rates = schedule(updates)
    for x, y in batches():
        losses = [
            nn.functional.mse_loss(net(a), b) / 4
            for a, b in zip(x.split(2), y.split(2), strict=True)
        ]
        total = torch.stack(losses).sum()
        total.backward()
        if total.isfinite() or not skip:
            updates.step()
            rates.step()
        updates.zero_grad()
    return net.state_dict()


def train(
    rank: int, pp: int, on_nan: str | None
) -> tuple[dict[str, torch.Tensor] | None, str, list[str]]:
    """The final state, the error if there is one, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("piper").addHandler(handler)
    trainer = piper.Trainer(
        model(), nn.functional.mse_loss, piper.strategies.one_f_one_b(pp=pp, microbatches=4),
        optimizer=optimizer, lr_scheduler=schedule, example=batches()[0], on_nan=on_nan,
    )  # fmt: skip
    error = ""
    try:
        for batch in batches():
            trainer.step(*batch)
    except InputError as found:
        error = str(found)
    finally:
        logging.getLogger("piper").removeHandler(handler)
    state = None if error else trainer.state_dict()
    trainer.close()
    return state, error, [line for line in lines if "step " in line]
