"""Backwards of the user's autograd.Functions, in models that are too large for trials."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import one_of
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


@one_of(3)
@pytest.mark.parametrize("name", BATCHWISE)
def test_what_depends_on_other_rows_is_warned_of(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "test_own_backwards.py" in warned(BATCHWISE[name], caplog, monkeypatch)


NOT_LINEAR: dict[str, Back] = {
    "clipped": lambda g, h: g.clamp(-1e-3, 1e-3),
    "signs": lambda g, h: 1e-3 * g.sign(),
    "of length one": lambda g, h: g / (g.norm(dim=1, keepdim=True) + 1e-9),
    "with a penalty": lambda g, h: g + 1e-3 * h,
}


@one_of(6)
@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_backward_that_is_not_linear_is_as_in_plain_training(
    name: str, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where each row has its own, in a mean that PyTorch divides before the backward begins."""
    net, (x, y) = Net(NOT_LINEAR[name]).double(), torch.randn(2, 10, WIDTH).double().unbind()
    F.mse_loss(net(x), y).backward()
    wanted = net.layer.weight - 0.1 * net.layer.weight.grad
    with caplog.at_level(logging.WARNING, "piper"):
        found = rehearse(
            net, F.mse_loss, [Place(where(), [0]), Split("MB", parts)], [(x, y)],
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        )  # fmt: skip

    torch.testing.assert_close(found.parameters["layer.weight"], wanted, rtol=1e-10, atol=1e-13)
    assert not caplog.text


@one_of(2)
@pytest.mark.parametrize("name", ROWWISE)
def test_what_each_row_does_alone_is_not(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not warned(ROWWISE[name], caplog, monkeypatch)


Grad = Callable[[Tensor, Tensor], Tensor]
CHANGED: dict[str, Grad] = {
    "of length one": lambda g, w: g / g.norm(),
    "clipped": lambda g, w: g.clamp(-1e-3, 1e-3),
    "signs": lambda g, w: g.sign(),
    "a penalty": lambda g, w: g + 1e-3 * w,
    "with a number": lambda g, w: g + 1e-3,
    "squared": lambda g, w: g * g,
    "centred by its size": lambda g, w: g - 0.1 * g.abs().mean(),
}
LINEAR: dict[str, Grad] = {
    "scaled": lambda g, w: 0.5 * g / 3,
    "masked": lambda g, w: g * (w.abs() < 1),
    "centred": lambda g, w: g - g.mean(0),
    "projected": lambda g, w: (w @ w.t()) @ g.t().t(),
    "chosen": lambda g, w: torch.where(w > 0, g, torch.zeros_like(g)),
    "in another type": lambda g, w: g.to(torch.float64).float(),
}


class OfWeight(torch.autograd.Function):
    """Its backward is given the gradient of a weight: a sum over rows."""

    @staticmethod
    def forward(context: Any, w: Tensor, change: Grad) -> Tensor:
        context.save_for_backward(w)
        context.change = change
        return w * 1

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (w,) = context.saved_tensors
        return context.change(gradient, w), None


class Multiplied(torch.autograd.Function):
    """Its backward computes the gradient of a weight."""

    @staticmethod
    def forward(context: Any, x: Tensor, w: Tensor, change: Grad) -> Tensor:
        context.save_for_backward(x, w)
        context.change = change
        return x @ w

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = context.saved_tensors
        return gradient @ w.t(), context.change(x.t() @ gradient, w), None


class Weighted(nn.Module):
    def __init__(self, change: Grad, given: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change, self.given = nn.Linear(WIDTH, WIDTH), change, given
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        if self.given:
            return h @ OfWeight.apply(self.weight, self.change)
        return Multiplied.apply(h, self.weight, self.change)


@one_of(12)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", [*CHANGED, *LINEAR])
def test_gradients_of_weights_must_stay_sums_over_rows(
    name: str, given: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)
    monkeypatch.setattr(trial_size, "MOST", 0.0)
    x, y = torch.randn(2, 10, WIDTH).unbind()
    change = CHANGED.get(name) or LINEAR[name]
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Weighted(change, given), F.mse_loss, HALVES, [(x, y)])

    assert ("test_own_backwards.py" in caplog.text) == (name in CHANGED)
    assert bool(caplog.text) == (name in CHANGED)
