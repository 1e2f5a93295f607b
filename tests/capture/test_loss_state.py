"""Losses with state: buffers are carried, other state is refused, and the loss stays as it is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn

import piper
from piper import Split, Trainer, rehearse, where
from piper.capture.trace.forward import trace
from piper.errors import CaptureError


class Centred(nn.Module):
    """Subtracts a centre that follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6).double())
        self.calls, self.alpha = 0, 1.0

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        loss = (y - target - self.centre).square().mean()
        self.update(y.detach().mean(0))
        return loss

    def update(self, mean: Tensor) -> None:
        self.centre = 0.5 * self.centre + 0.5 * mean


class InPlace(Centred):
    def update(self, mean: Tensor) -> None:
        self.centre.mul_(0.5).add_(mean, alpha=0.5)


class Inside(nn.Module):
    """The state is in a module of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InPlace()

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return self.inner(y, target) * 2


class Warms(Centred):
    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (y - target).square().mean() * min(self.calls, 10)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(2))
        for _ in range(steps)
    ]  # type: ignore[misc]


def plainly(model: nn.Module, loss: nn.Module, steps: int) -> list[float]:
    """Two microbatches in each step, one after the other."""
    optimizer, found = sgd(model.parameters()), []
    for x, y in data(steps):
        optimizer.zero_grad()
        parts = [loss(model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        sum(parts).backward()
        optimizer.step()
        found.append(float(sum(parts)))
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


STRATEGY = [piper.Place(where(), [0]), Split("MB", 2)]


@one_of(2)
@pytest.mark.parametrize("make", [Centred, InPlace, Inside], ids=lambda make: make.__name__)
def test_buffers_of_a_loss_are_carried(make: type[nn.Module]) -> None:
    loss, expected = make(), plainly(net(), make(), 4)
    before = copy.deepcopy(loss.state_dict())

    found = rehearse(net(), loss, STRATEGY, data(4), optimizer=sgd, loss_weight=lambda *part: 1)

    assert list(found.losses) == pytest.approx(expected, rel=1e-12)
    assert all(torch.equal(one, before[name]) for name, one in loss.state_dict().items())


def test_a_run_resumes_with_the_state_of_its_loss(tmp_path: Path) -> None:
    expected, batches = plainly(net(), InPlace(), 4), data(4)

    def trained(steps: list[int], resume: bool) -> list[float]:
        options = {"optimizer": sgd, "loss_weight": lambda *part: 1, "device": "cpu"}
        trainer = Trainer(net(), InPlace(), STRATEGY, example=batches[0], **options)
        if resume:
            trainer.resume(tmp_path / "run")
        found = [float(trainer.step(*batches[step]).loss) for step in steps]
        trainer.save(tmp_path / "run")
        assert set(trainer.state_dict() or ()) == set(net().state_dict())
        trainer.close()
        return found

    found = trained([0, 1], False) + trained([2, 3], True)

    assert found == pytest.approx(expected, rel=1e-12)


def test_a_loss_that_reads_its_own_counter_is_refused() -> None:
    loss = Warms()

    with pytest.raises(CaptureError) as refused:
        trace(net(), loss, data(1)[0], "cpu")

    assert "the forward changes loss_fn.calls" in str(refused.value)
    assert loss.calls == 0
