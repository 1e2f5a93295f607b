"""A small model of two regions, and plain training of it in a loop."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import piper
from piper import Place, where

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TWO = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]


class Net(nn.Module):
    """Two regions; what is between them is up to the test."""

    def __init__(self, *middle: nn.Module, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(width, width)
        self.middle = nn.Sequential(*middle)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        with piper.annotate("PP"):
            x = self.middle(torch.tanh(self.first(x)))
        with piper.annotate("PP"):
            return self.last(x) * scale


def data(steps: int = 3, rows: int = 12, width: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    draw = partial(torch.randn, rows, width, generator=generator)
    return [(draw(), draw()) for _ in range(steps)]


def plainly(model, loss_fn, batches, parts: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """A plain loop; the loss is the mean of the microbatches'."""
    optimizer, losses = SGD(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for k in range(parts):
            rows = batch[0].shape[0] // parts
            piece = [t[k * rows : (k + 1) * rows] if isinstance(t, Tensor) else t for t in batch]
            loss = loss_fn(model(*piece[:-1]), piece[-1]) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_equal(result: piper.rehearse, wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, state = wanted
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses), rtol=1e-6, atol=0)
    for name, tensor in result.parameters.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-7)
    assert set(result.parameters) <= set(state)
