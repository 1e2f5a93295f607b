"""Covariances, correlations and combinations are those of torch, which asks for values in them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from draws import drawn, draws
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.trace.replaced.calls import ReplacedCalls

Call = tuple[Any, Tensor, dict[str, Any]]
SGD = partial(torch.optim.SGD, lr=0.1)


def drawn_call(seed: int) -> Call:
    """A function, its argument and its options."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = draw.choice([(5,), (3, 5), (1, 4), (6, 3), (2, 2)])
    kind = draw.choice([torch.float64, torch.float64, torch.complex128])
    function = draw.choice([torch.cov, torch.corrcoef, torch.combinations, torch.cov])
    x = torch.randn(shape, generator=generator, dtype=kind)
    options: dict[str, Any] = {}
    if function is torch.combinations:
        x = x.reshape(-1)[:5]
        options = {"r": draw.randint(1, 3), "with_replacement": draw.random() < 0.5}
    elif function is torch.cov:
        columns = x.shape[-1]
        options = {"correction": draw.randint(0, 2)}
        if draw.random() < 0.5:
            options["fweights"] = torch.randint(1, 4, (columns,), generator=generator)
        if draw.random() < 0.5:
            options["aweights"] = torch.rand(columns, generator=generator, dtype=torch.float64)
    return function, x, options


def outcome(function: Any, x: Tensor, options: dict[str, Any]) -> list[Tensor]:
    own = x.clone().requires_grad_()
    found = function(own, **options)
    return [found, *torch.autograd.grad(found.abs().square().sum(), [own])]


@drawn
@pytest.mark.filterwarnings("ignore:cov")
@pytest.mark.parametrize("seed", range(draws(40, 1000)))
def test_values_and_gradients_are_those_of_torch(seed: int) -> None:
    given = drawn_call(seed)
    right = outcome(*given)
    with ReplacedCalls():
        found = outcome(*given)

    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12, equal_nan=True)


@pytest.mark.filterwarnings("ignore:cov")
def test_other_types_are_those_of_torch() -> None:
    for x in (torch.arange(12).reshape(3, 4) ** 2 % 7, torch.randn(3, 4), torch.ones(3, 4).half()):
        for function in (torch.cov, torch.combinations):
            given = x[0] if function is torch.combinations else x
            right = function(given)
            with ReplacedCalls():
                torch.testing.assert_close(function(given), right, rtol=1e-3, atol=1e-3)


class Whitened(nn.Module):
    """The channels of each image, decorrelated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        own = torch.stack([torch.cov(one) + torch.corrcoef(one) for one in h])
        pairs = torch.stack([torch.combinations(one[:, 0], 3).prod(1) for one in h])
        return self.last(own) + pairs[:, :, None]


def test_models_with_them_train_as_in_plain_pytorch() -> None:
    x, y = torch.randn(2, 4, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, batches = Whitened(), [(x, y[..., :4]), (y, x[..., :4])]
    losses = plain_losses(SGD(model.parameters()), batches, lambda a, b: F.mse_loss(model(a), b))
    strategy = [Place(where(), [0]), Split("MB", 2)]

    found = rehearse(Whitened(), F.mse_loss, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-9, atol=0)
