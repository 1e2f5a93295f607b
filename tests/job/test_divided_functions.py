"""The user's own backwards in divided models. They need not be linear: these clip gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper import annotate, rehearse
from piper.strategies import one_f_one_b

LIMIT, PARTS = 2e-3, 2
SGD = partial(torch.optim.SGD, lr=1.0)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-LIMIT, LIMIT)


@torch.library.custom_op("tests_divided::clip", mutates_args=())
def clip(x: Tensor) -> Tensor:
    return x.clone()


clip.register_fake(torch.empty_like)
clip.register_autograd(lambda ctx, grad: grad.clamp(-LIMIT, LIMIT))


CLIPPED: dict[str, Any] = {"Function": Clip.apply, "operator": clip}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            return self.down(torch.tanh(self.up(CLIPPED[self.kind](self.first(x)))))


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rand = partial(torch.randn, 4, 4, 8, dtype=torch.float64, generator=draw)
    return [(rand(), rand()) for _ in range(2)]


@pytest.mark.parametrize("how", ["tp", pytest.param("cp", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["Function", pytest.param("operator", marks=pytest.mark.soak)])
def test_a_backward_that_is_not_linear_sees_whole_gradients(how: str, kind: str) -> None:
    strategy = one_f_one_b(pp=1, microbatches=PARTS, **{how: 2})

    found = rehearse(Net(kind), loss_fn, strategy, batches(), optimizer=SGD)

    model = Net(kind)
    optimizer = SGD(model.parameters())
    for x, y in batches():
        for part in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            (loss_fn(model(part[0]), part[1]) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=0, atol=1e-12)
