"""Models that return a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Split, rehearse, where
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass
class Plain:
    logits: Tensor


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    name: str = "frozen"


@dataclass(slots=True)
class Slots:
    logits: Tensor
    others: list[Tensor] = field(default_factory=list)


@dataclass
class Twice:
    """What it computes after it was made must not be computed again."""

    logits: Tensor

    def __post_init__(self) -> None:
        self.logits = self.logits * 2


@dataclass
class Nested:
    inner: Plain

    @property
    def logits(self) -> Tensor:
        return self.inner.logits


MADE: dict[str, Any] = {
    "plain": Plain,
    "frozen": Frozen,
    "slots": lambda x: Slots(x, [x * 2]),
    "twice": Twice,
    "nested": lambda x: Nested(Plain(x)),
}
STRATEGIES = {
    "whole": None,
    "microbatches": [Place(where(), [0]), Split("MB", 3)],
    "replicas": one_f_one_b(pp=1, dp=2, microbatches=2, zero=1),
}


class Net(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make = nn.Linear(4, 3).double(), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


def loss(found: Any, y: Tensor) -> Tensor:
    return functional.mse_loss(found.logits, y)


@one_of(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MADE)
def test_they_train_as_in_plain_pytorch(name: str, strategy: str) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [
        tuple(torch.randn(12, width, generator=draw).double() for width in (4, 3)) for _ in range(3)
    ]
    model = Net(MADE[name])
    optimizer, losses = SGD(model.parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        losses.append(found.item())

    run = rehearse(Net(MADE[name]), loss, STRATEGIES[strategy], batches, optimizer=SGD)

    assert run.losses == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(run.parameters["layer.weight"], model.layer.weight.detach())
