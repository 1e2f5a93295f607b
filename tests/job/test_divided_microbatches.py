"""Microbatches of several sizes, divided and recomputed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import nn
from torch.nn import functional

from piper import rehearse
from piper.strategies import one_f_one_b

CASES: dict[str, dict[str, Any]] = {
    "cp, a share": {"cp": 2, "remat": 0.5},
    "tp, all": {"tp": 2, "remat": True},
    "cp, matmuls": {"cp": 2, "remat": "matmuls"},
    "tp, a share": {"tp": 2, "remat": 0.5},
    "tp and cp": {"tp": 2, "cp": 2, "remat": True},
}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def batches() -> list[tuple[torch.Tensor, ...]]:
    """Eight rows, which three microbatches cut into 3, 3 and 2."""
    draw = torch.Generator().manual_seed(1)
    made = torch.randn(3, 2, 8, 4, 4, generator=draw, dtype=torch.float64)
    return [tuple(one) for one in made]


@one_of(2)
@pytest.mark.parametrize("name", every(2, CASES))
def test_they_train_as_the_whole_batch(name: str) -> None:
    plain = Net()
    optimizer, losses = SGD(plain.parameters()), []
    for x, y in batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(plain(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()

    strategy = one_f_one_b(pp=1, microbatches=3, **CASES[name])
    found = rehearse(Net(), functional.mse_loss, strategy, batches(), optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-6)
    for key, one in plain.named_parameters():
        torch.testing.assert_close(found.parameters[key], one.detach(), rtol=1e-10, atol=1e-12)
