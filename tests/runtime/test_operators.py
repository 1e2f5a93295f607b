"""Operators of a user's own: what they do inside is their business, autograd included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.capture.torch_private import is_plain

LIBRARY = torch.library.Library("test_operators", "DEF")
OPS: Any = torch.ops.test_operators


def like(x: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x)


def cubed_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Recomputes, and lets autograd find the gradient."""
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        return torch.autograd.grad(again**3, again, grad)[0]


LIBRARY.define("cubed(Tensor x) -> Tensor")
LIBRARY.define("cubed_backward(Tensor x, Tensor grad) -> Tensor")
LIBRARY.impl("cubed", lambda x: x**3, "CPU")
LIBRARY.impl("cubed_backward", cubed_backward, "CPU")
torch.library.register_fake("test_operators::cubed", like)
torch.library.register_fake("test_operators::cubed_backward", like)
torch.library.register_autograd(
    "test_operators::cubed",
    lambda ctx, grad: OPS.cubed_backward(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# `scaled` has a kernel of its own where autograd is asked, and another one below.
LIBRARY.define("scaled(Tensor x) -> Tensor")
LIBRARY.impl("scaled", lambda x: x * 1.0, "CompositeImplicitAutograd")
LIBRARY.impl("scaled", lambda x: x * 5.0, "AutogradCPU")
LIBRARY.define("outside(Tensor x) -> Tensor")
LIBRARY.impl("outside", lambda x: OPS.scaled(x).clone(), "CPU")
torch.library.register_fake("test_operators::outside", like)


class Two(nn.Module):
    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.operator = nn.Linear(8, 8), nn.Linear(8, 8), operator

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.first(x)
        with piper.annotate("PP"):
            return self.second(self.operator(x))


def loss(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


@pytest.mark.parametrize(
    "operator",
    [OPS.cubed, lambda x: x * OPS.outside(x.detach())],
    ids=["autograd inside", "a kernel where autograd is asked"],
)
def test_they_compute_what_they_compute_in_plain_pytorch(
    operator: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    plain, batch = Two(operator), (torch.randn(4, 8), torch.randn(4, 8))
    model = Two(operator)
    model.load_state_dict(plain.state_dict())
    adamw = functools.partial(torch.optim.AdamW, lr=0.1)
    trainer = piper.Trainer(
        model, loss, [piper.Place(piper.where(), [0])], optimizer=adamw, example=batch, device="cpu"
    )
    optimizer = adamw(plain.parameters())
    for _ in range(3):
        expected = loss(plain(batch[0]), batch[1])
        expected.backward()
        assert trainer.step(*batch).loss == pytest.approx(expected.item(), abs=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    trainer.close()


def test_graphs_of_known_operators_alone_are_plain() -> None:
    def graph(function: Callable[..., Any]) -> torch.fx.Graph:
        return torch.fx.experimental.proxy_tensor.make_fx(function)(torch.ones(2)).graph

    assert is_plain(graph(lambda x: x.sin() @ x))
    assert not is_plain(graph(OPS.outside))
    assert not is_plain(graph(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))))
