"""Weights of a teacher or discriminator that a loss reads: what a loop loads into them counts."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper import Trainer
from piper.capture.python_state.watch import Watch

Loss = Callable[[Tensor, Tensor], Tensor]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    parts = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)
    return nn.Sequential(*parts).double()


def teacher() -> nn.Module:
    return net(1).requires_grad_(False).eval()


class Held(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(self.other(output), target)


class Object:
    def __init__(self, other: nn.Module) -> None:
        self.others = [other]

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(self.others[0](output), target)


def through(other: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(other(output), target)


LOSSES: dict[str, Callable[[nn.Module], Any]] = {
    "closure": lambda other: lambda output, target: mse_loss(other(output), target),
    "module": Held, "object": Object, "partial": lambda other: partial(through, other),
    "method": lambda other: Held(other).forward,
}  # fmt: skip


def loads(other: Any) -> None:
    other.load_state_dict(net(2).state_dict())


@torch.no_grad()
def averages(other: Any) -> None:
    for mine, new in zip(other.parameters(), net(2).parameters(), strict=True):
        mine.lerp_(new, 0.1)


def by_data(other: Any) -> None:
    other[0].weight.data.mul_(0.9)


def assigned(other: Any) -> None:
    other[0].weight = nn.Parameter(torch.ones(3, 3).double(), requires_grad=False)


def statistics(other: Any) -> None:
    other[1].running_mean.add_(1.0)


@one_of(3)
@pytest.mark.parametrize("change", [loads, averages, by_data, assigned, statistics])
@pytest.mark.parametrize("loss", LOSSES)
def test_other_weights_are_seen(loss: str, change: Callable[[nn.Module], None]) -> None:
    other = teacher()
    seen = Watch(net(), LOSSES[loss](other))
    assert seen.now() == 0

    change(other)
    assert seen.now() != 0


def test_the_models_own_weights_are_none_of_these() -> None:
    model = net()
    seen = Watch(model, lambda output, target: mse_loss(output, target) * model[0].in_features)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert seen.now() == 0


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 2, 4, 3, generator=made, dtype=torch.float64)
    return [(x, y) for x, y in drawn]


def plain() -> list[float]:
    model, other, losses = net(), teacher(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for k, (x, y) in enumerate(batches()):
        other.load_state_dict(net(k + 1).state_dict())
        optimizer.zero_grad()
        loss = through(other, model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("loss", every(2, ["closure", "module"]))
def test_a_teacher_that_changes_is_that_of_each_step(
    loss: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the derivative of its first weights is in the cache."""
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path))
    for _ in range(2):
        other, found = teacher(), []
        made, given = partial(torch.optim.SGD, lr=0.3), LOSSES[loss](other)
        trainer = Trainer(net(), given, example=batches()[0], optimizer=made)
        for k, batch in enumerate(batches()):
            other.load_state_dict(copy.deepcopy(net(k + 1).state_dict()))
            found.append(trainer.step(*batch).loss)
        trainer.close()
        assert found == pytest.approx(plain(), abs=1e-12)
