"""What a forward leaves in buffers and gradients is what plain PyTorch would find, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.capture import capture
from piper.errors import CaptureError

Mix = Callable[[Any, Tensor], Tensor]
SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    old: Tensor
    new: Tensor

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.mix = nn.Linear(3, 3), mix
        self.register_buffer("old", torch.zeros(3, 3))
        self.register_buffer("new", torch.zeros(3, 3))
        self.double()
        self.plain = torch.zeros(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, self.a(x))


def kept(how: Callable[[Tensor], Tensor], name: str = "old") -> Mix:
    """Computes with the weight of the last step."""

    def mix(net: Any, x: Tensor) -> Tensor:
        found = x @ (net.a.weight - getattr(net, name))
        setattr(net, name, how(net.a.weight))
        return found

    return mix


def follows_a_buffer(net: Any, x: Tensor) -> Tensor:
    found = x @ (net.new - net.old)
    net.old = net.new
    net.new.add_(1.0)
    return found


def moved(net: Any, x: Tensor) -> Tensor:
    """Not in place: the old one is what the new one was."""
    found = x @ (net.new - net.old) + x
    net.old = net.new
    net.new = net.new + net.a.weight.detach()
    return found


def both(net: Any, x: Tensor) -> Tensor:
    found = x @ (net.new - 2 * net.old) + x
    net.old = net.new = net.a.weight.detach() * 2
    return found


SHARED: dict[str, Mix] = {
    "detached": kept(lambda one: one.detach()),
    "data": kept(lambda one: one.data),
    "view": kept(lambda one: one.detach().t()),
    "slice": kept(lambda one: one.detach()[:]),
    "reshaped": kept(lambda one: one.detach().reshape(3, 3)),
    "attribute": kept(lambda one: one.detach(), "plain"),
    "buffer": follows_a_buffer,
}
OWN: dict[str, Mix] = {
    "clone": kept(lambda one: one.detach().clone()),
    "computed": kept(lambda one: one.detach() * 1.0),
    "attribute": kept(lambda one: one.detach().clone(), "plain"),
    "moved": moved,
    "both": both,
}


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 4, 3, generator=drawn, dtype=torch.float64)
    return x, y


@pytest.mark.parametrize("name", SHARED)
def test_a_buffer_that_would_follow_another_tensor_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"the forward keeps \S+ itself in \w+, not a copy"):
        capture(Net(SHARED[name]), F.mse_loss, batch())


@pytest.mark.parametrize("name", every(2, OWN))
def test_one_with_values_of_its_own_is_as_in_plain_pytorch(name: str) -> None:
    plain, batches = Net(OWN[name]), [batch(step) for step in range(3)]
    expected = plain_losses(SGD(plain.parameters()), batches, lambda x, y: F.mse_loss(plain(x), y))
    found = rehearse(Net(OWN[name]), F.mse_loss, None, batches, optimizer=SGD)

    assert found.losses == pytest.approx(expected, abs=1e-12)
    known = {**plain.state_dict(), "plain": plain.plain}
    for key, one in found.parameters.items():
        torch.testing.assert_close(one, known[key], rtol=0, atol=1e-12)


def sets_a_gradient(net: Any, x: Tensor) -> Tensor:
    net.a.weight.grad = torch.ones_like(net.a.weight)
    return x


def test_a_gradient_that_a_forward_sets_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_left_state.py:\d+: the forward sets the gradien"):
        capture(Net(sets_a_gradient), F.mse_loss, batch())


def asks(net: Any, x: Tensor) -> Tensor:
    for one in net.parameters():
        one.grad = None
    return x if net.a.weight.grad is None else 2 * x


def test_a_forward_may_take_gradients_away() -> None:
    capture(Net(asks), F.mse_loss, batch())


def test_the_gradient_of_a_random_slope_at_zero() -> None:
    mix: Mix = lambda net, x: F.rrelu(x - x.detach(), training=False) + x  # noqa: E731
    plain, batches = Net(mix), [batch(step) for step in range(2)]
    expected = plain_losses(SGD(plain.parameters()), batches, lambda x, y: F.mse_loss(plain(x), y))
    found = rehearse(Net(mix), F.mse_loss, None, batches, optimizer=SGD)

    assert found.losses == pytest.approx(expected, abs=1e-12)
