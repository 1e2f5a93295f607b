"""A loss that is a mean over rows, with gradients that are none, in models too large to try."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.job.loss import trial_size
from piper.strategies import gpipe

WIDTH = 4
Loss = Callable[[Tensor, Tensor], Tensor]


def parts(o: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(o[:, :2], y[:, :2]), F.l1_loss(o[:, 2:], y[:, 2:])


def balanced(o: Tensor, y: Tensor) -> Tensor:
    a, b = parts(o, y)
    return a + b * (a / b).detach()


def balanced_apart(o: Tensor, y: Tensor) -> Tensor:
    a, b = parts(o, y)
    return a + b * (a.detach() / b.detach())


def normed(o: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(o, y)
    return loss / loss.detach()


def logarithmic(o: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(o, y)
    return loss.log() + (loss - loss.log()).detach()


def root(o: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(o, y)
    return loss.sqrt() + (loss - loss.sqrt()).detach()


def straight_through(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o + (o.round() - o).detach(), y)


def scaled_rows(o: Tensor, y: Tensor) -> Tensor:
    """Each row by itself."""
    each = (o - y).square().mean(1)
    return (each / each.detach()).mean()


def balanced_rows(o: Tensor, y: Tensor) -> Tensor:
    a, b = (o - y).square().mean(1), (o - y).abs().mean(1)
    return (a + b * (a / b).detach()).mean()


class Halved(nn.Module):
    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.mse_loss(*both) for both in zip(o, y, strict=True)]).mean()


OTHER: list[Loss] = [balanced, balanced_apart, normed, logarithmic, root]
SAME: list[Loss] = [straight_through, scaled_rows, balanced_rows, Halved(), F.huber_loss]


def warned(loss: Loss, most: float, monkeypatch: pytest.MonkeyPatch, caplog) -> bool:
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)  # as if the model was large
    monkeypatch.setattr(trial_size, "MOST", most)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(model, loss, gpipe(pp=1, microbatches=2), [(torch.randn(2, 8, WIDTH).unbind())])
    return "the gradients of the loss are no means or sums over rows" in caplog.text


@one_of(3)
@pytest.mark.parametrize("most", [0.0, 1e9], ids=["large", "less large"])
@pytest.mark.parametrize("loss", OTHER, ids=lambda loss: loss.__name__)
def test_other_gradients_are_told(loss: Loss, most: float, monkeypatch, caplog) -> None:
    assert warned(loss, most, monkeypatch, caplog)


@one_of(6)
@pytest.mark.parametrize("most", [0.0, 1e9], ids=["large", "less large"])
@pytest.mark.parametrize("loss", SAME, ids=lambda loss: getattr(loss, "__name__", "Halved"))
def test_gradients_of_rows_are_not(loss: Loss, most: float, monkeypatch, caplog) -> None:
    assert not warned(loss, most, monkeypatch, caplog)
