"""A layer that is called twice: its parameters are held in one way, which both calls must use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import every
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import annotate, rehearse, strategies

SGD = torch.optim.SGD


class Along(nn.Module):
    """A convolution along the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": Along,
    "linear": lambda: nn.Linear(8, 8),
    "norm": lambda: nn.LayerNorm(8),
    "products": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
    "mixture": lambda: nn.Sequential(Along(), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)),
}


class Shared(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other = LAYERS[name](), LAYERS[name]()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.other, self.first):
            with annotate("L"):
                x = x + torch.tanh(layer(x))
        return x


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3, 2, 4, 8, 8, dtype=torch.float64, generator=generator)
    return [(x, y) for x, y in drawn]


def plain(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = SGD(model.parameters(), lr=0.1)
    losses = plain_losses(optimizer, batches(), lambda x, y: functional.mse_loss(model(x), y))
    return losses, {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize(("name", "way"), every(11, [(n, w) for n in LAYERS for w in ("cp", "tp")]))
def test_a_shared_layer_is_divided(name: str, way: str) -> None:
    strategy = strategies.one_f_one_b(pp=2, microbatches=2, **{way: 2})

    found = rehearse(
        Shared(name), functional.mse_loss, strategy, batches(),
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
    )  # fmt: skip

    losses, parameters = plain(Shared(name))
    assert found.losses == pytest.approx(losses, rel=1e-12)
    for key, wanted in parameters.items():
        torch.testing.assert_close(found.parameters[key], wanted, rtol=1e-11, atol=1e-13)
