"""Activations in place behind norms, convolutions and sums, as vision models write them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.strategies import one_f_one_b

ROWS, CHANNELS, SIZE = 4, 4, 6
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.2, inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "mish": lambda: nn.Mish(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(inplace=True),
    "celu": lambda: nn.CELU(inplace=True),
    "selu": lambda: nn.SELU(inplace=True),
    "hardsigmoid": lambda: nn.Hardsigmoid(inplace=True),
    "threshold": lambda: nn.Threshold(0.1, 0.0, inplace=True),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(CHANNELS),
    "group": lambda: nn.GroupNorm(2, CHANNELS),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "none": nn.Identity,
    "pooled": lambda: nn.MaxPool2d(3, 1, 1),
    "permuted": lambda: Permuted(),
}


class Permuted(nn.Module):
    """As a channels-last norm does: what comes after it is a view, or a copy of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), norm()
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.conv(self.activation(self.norm(self.conv(x)))))
        inner += x
        return self.activation(inner)


def net(norm: str, activation: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(NORMS[norm], ACTIVATIONS[activation]) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(CHANNELS * SIZE**2, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    shape = (ROWS, CHANNELS, SIZE, SIZE)
    return [(torch.randn(shape).double(), torch.randint(0, 3, (ROWS,))) for _ in range(3)]


CASES = [*product(["batch"], ACTIVATIONS), *product(list(NORMS)[1:], ["relu", "hardswish"])]


@one_of(4)
@pytest.mark.parametrize(("norm", "activation"), every(4, CASES))
def test_they_train_as_without_piper(norm: str, activation: str) -> None:
    model, parts = net(norm, activation), 1 if norm == "batch" else 2
    plain = deepcopy(model)

    def loss_of(x: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(plain(x), wanted)

    strategy: Any = one_f_one_b(pp=2, microbatches=parts)
    found = rehearse(model, F.cross_entropy, strategy, batches(), optimizer=SGD)
    wanted = plain_losses(SGD(plain.parameters()), batches(), loss_of)
    assert found.losses == pytest.approx(wanted, rel=1e-9)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], value.detach(), rtol=1e-9, atol=1e-9)
