"""Operators for which torch has a derivative, and a decomposition that traces would take instead.

The decomposition of a margin loss with several labels is wrong where a row has fewer than all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import drawn, draws, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where

Loss = Callable[[Tensor, Tensor], Tensor]
ROWS, CLASSES = 8, 5
LOSSES: dict[str, Loss] = {
    "several labels": F.multilabel_margin_loss,
    "several labels, of each row": lambda o, y: F.multilabel_margin_loss(
        o, y, reduction="none"
    ).mean(),
    "one label": lambda o, y: F.multi_margin_loss(o, y[:, 0]),
    "one label, squared": lambda o, y: F.multi_margin_loss(o, y[:, 0], p=2, margin=0.5),
    "hard": lambda o, y: F.cross_entropy(F.hardshrink(o, 0.3), y[:, 0]),
    "soft": lambda o, y: F.cross_entropy(F.softshrink(o, 0.3), y[:, 0]),
}
SGD = partial(torch.optim.SGD, lr=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(CLASSES, CLASSES), nn.Tanh(), nn.Linear(CLASSES, CLASSES)
    ).double()


def labelled(seed: int) -> tuple[Tensor, Tensor]:
    """Rows with one label to all of them, and -1 behind the last."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=draw)
    labels = torch.rand(ROWS, CLASSES, generator=draw).argsort(1)
    count = torch.randint(1, CLASSES + 1, (ROWS, 1), generator=draw)
    return x, labels.masked_fill(torch.arange(CLASSES) >= count, -1)


def check(loss: Loss, seed: int, compiled: bool = False) -> None:
    plain, batches = model(), [labelled(3 * seed + k) for k in range(3)]
    optimizer, losses = SGD(plain.parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        found = loss(plain(x), y)
        found.backward()
        optimizer.step()
        losses.append(found.item())

    strategy = [Place(where(), [0]), Split("MB", 2)]
    made = rehearse(model(), loss, strategy, batches, optimizer=SGD, compiled=compiled)

    assert made.losses == pytest.approx(losses, rel=1e-12)
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(made.parameters[name], wanted, rtol=1e-10, atol=1e-12)


@one_of(2)
@drawn
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(draws(1, 8)))
def test_losses_are_those_of_plain_pytorch(name: str, seed: int) -> None:
    check(LOSSES[name], seed)


def test_compiled_ones_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # where Inductor refuses kernels that it could decompose

    check(LOSSES["several labels"], 0, compiled=True)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="since torch 2.13")
def test_a_loss_in_chunks_is_that_of_plain_pytorch() -> None:
    chunks = nn.LinearCrossEntropyOptions  # type: ignore[attr-defined,unused-ignore]

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.head = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
            self.double()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            given = torch.tanh(self.first(x)), self.head.weight, y[:, 0]
            return F.linear_cross_entropy(*given, linear_bias=self.head.bias, options=chunks())

    plain, (x, y) = Chunked(), labelled(0)
    loss = plain(x, y)
    loss.backward()
    SGD(plain.parameters()).step()

    found = rehearse(Chunked(), None, None, [(x, y)], optimizer=SGD)

    assert found.losses == pytest.approx([loss.item()], rel=1e-12)
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-10, atol=1e-12)
