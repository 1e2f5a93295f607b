"""Writes in place that autograd does not see: gradients pass by them in eager training.

A trace would make them functions without a gradient, so they are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.errors import CaptureError

Change = Callable[[Tensor], Tensor]
ROWS, WIDTH = 6, 4
SGD = partial(torch.optim.SGD, lr=0.5)


def unseen(write: Callable[[Tensor], object]) -> Change:
    def change(h: Tensor) -> Tensor:
        with torch.no_grad():
            write(h)
        return h

    return change


def by_data(write: Callable[[Tensor], object], detached: Change) -> Change:
    def change(h: Tensor) -> Tensor:
        write(detached(h))
        return h

    return change


def set_first(h: Tensor) -> None:
    h[:, 0] = 0.0


def renormed(h: Tensor) -> Tensor:
    return h + F.embedding(torch.arange(WIDTH).repeat(ROWS)[:ROWS], h[:WIDTH] * 2, max_norm=0.5)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "clamped": lambda h: h.clamp_(-0.3, 0.3),
    "scaled": lambda h: h.mul_(0.5),
    "rounded": lambda h: h.round_(),
    "copied": lambda h: h.copy_(h.round()),
    "an index": set_first,
    "a slice": lambda h: h[:, 1:].div_(3.0),
    "a view": lambda h: h.view(-1)[::2].zero_(),
    "masked": lambda h: h.masked_fill_(h > 0, 0.1),
    "by out": lambda h: torch.mul(h.detach(), 2, out=h),
    "for each": lambda h: torch._foreach_mul_([h], 0.5),
}
HIDDEN: dict[str, Change] = {
    **{f"no_grad, {name}": unseen(write) for name, write in WRITES.items()},
    **{
        f"data, {name}": by_data(write, lambda h: h.data)
        for name, write in WRITES.items()
        if name not in ("by out", "for each")
    },
    "detached": by_data(WRITES["clamped"], lambda h: h.detach()),
    "a detached slice": by_data(WRITES["scaled"], lambda h: h[1:].detach()),
    "an embedding's norm": renormed,
}


def own_copy(h: Tensor) -> Tensor:
    other = h.detach().clone()
    other.mul_(2)
    return h + other


def of_another(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean(-1, keepdim=True)
        scale.clamp_(min=0.5)
    return h / scale


def only_detached(h: Tensor) -> Tensor:
    h = h.detach()
    h.mul_(2)
    return h


def new_tensor(h: Tensor) -> Tensor:
    other = torch.zeros_like(h)
    with torch.no_grad():
        other.copy_(h)
    other[:, 0] = 1.0
    return h * other


SEEN: dict[str, Change] = {
    "in place": lambda h: h.mul_(0.5).clamp_(-0.3, 0.3),
    "a slice": lambda h: h.clone().index_fill_(1, torch.tensor([0]), 0.0),
    "a copy": own_copy,
    "a scale": of_another,
    "nothing but detached": only_detached,
    "a new tensor": new_tensor,
    "passed by": lambda h: h + (h.clamp(-0.3, 0.3) - h).detach(),
}


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.change(2 * self.first(x))))


X, Y = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("change", every(4, HIDDEN.values(), HIDDEN))
def test_a_write_that_autograd_does_not_see_is_refused(change: Change) -> None:
    with pytest.raises(CaptureError, match="writes in place to a tensor that has a gradient"):
        rehearse(Net(change), F.mse_loss, None, [(X, Y)], optimizer=SGD)


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_other_writes_are_those_of_eager_training(change: Change) -> None:
    model = Net(change)
    optimizer, losses = SGD(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    found = rehearse(Net(change), F.mse_loss, None, [(X, Y)] * 2, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-10, atol=1e-12)
