"""Backwards of the user's autograd.Functions, in models that are too large for trials."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.job.loss import trial_size

WIDTH = 6
HALVES = [Place(where(), [0]), Split("MB", 2)]
Back = Callable[[Tensor, Tensor], Tensor]
BATCHWISE: dict[str, Back] = {
    "first rows": lambda g, h: g * (torch.arange(len(g)) < 3)[:, None],
    "one row": lambda g, h: torch.cat([g[:1] * 2, g[1:]]),
    "written": lambda g, h: g.index_fill(0, torch.tensor([2]), 0.0),
    "normalised": lambda g, h: g / g.abs().max(),
    "centred": lambda g, h: g - g.mean(0),
    "of the forward": lambda g, h: g * h.std(0),
}
ROWWISE: dict[str, Back] = {
    "reversed": lambda g, h: -0.5 * g,
    "straight through": lambda g, h: g,
    "clipped": lambda g, h: g.clamp(-1, 1) * (h.abs() < 1),
    "by row": lambda g, h: g / (1 + g.norm(dim=1, keepdim=True)),
    "features": lambda g, h: g * torch.arange(WIDTH),
}


class Own(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, h: Tensor, back: Back) -> Tensor:
        context.save_for_backward(h)
        context.back = back
        return h.tanh()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (h,) = context.saved_tensors
        return context.back(gradient, h), None


class Linear(torch.autograd.Function):
    """As tutorials write it: gradients of weights are sums over rows."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class Net(nn.Module):
    def __init__(self, back: Back) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.back = nn.Linear(WIDTH, WIDTH), back

    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(Linear.apply(x, self.layer.weight, self.layer.bias), self.back)


def warned(back: Back, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)
    monkeypatch.setattr(trial_size, "MOST", 0.0)
    x, y = torch.randn(2, 10, WIDTH).unbind()
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Net(back), F.mse_loss, HALVES, [(x, y)])
    return caplog.text


@pytest.mark.parametrize("name", BATCHWISE)
def test_what_depends_on_other_rows_is_warned_of(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "test_own_backwards.py" in warned(BATCHWISE[name], caplog, monkeypatch)


@pytest.mark.parametrize("name", ROWWISE)
def test_what_each_row_does_alone_is_not(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not warned(ROWWISE[name], caplog, monkeypatch)
