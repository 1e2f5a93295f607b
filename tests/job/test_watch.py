"""What a training loop changes in Python between steps is read anew in each step."""

import copy
import logging
from typing import Any

import pytest
import torch
from kept_state import PLACES, Net, Place
from torch import Tensor, nn

import piper
from piper import Trainer, where
from piper.capture.python_state import watch
from piper.capture.python_state.watch import Watch
from piper.errors import InputError


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_change_is_seen_in_every_place(place: Place) -> None:
    net = Net(lambda self, y: get(self))
    get, put = place(net, 1.0)
    seen = Watch(net, None)

    states = [seen.now()]
    for value in (0.5, 0.5, 2.0, "warm", None, [1], 1.0):
        put(net, value)
        states.append(seen.now())

    first, half, same, two, text, none, items, back = states
    assert first == back == 0
    assert half == same
    assert len({0, half, two, text, none, items}) == 6


def test_what_no_code_reads_does_not_count() -> None:
    net = Net(lambda self, y: 1.0)
    net.history = []
    seen = Watch(net, None)

    net.step, net.last_loss = 1, 0.5
    net.history.append(3)

    assert seen.now() == 0
    net.step += 1
    assert seen.is_as_before()


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.temperature, self.mask = 1.0, torch.ones(6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) / self.temperature).tanh() * self.mask)


class Weighted:
    """A loss whose schedule is that of the training loop."""

    def __init__(self) -> None:
        self.alpha = 0.1

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean() + self.alpha * y.abs().mean()


def changed(model: Annealed, loss: Weighted, step: int) -> None:
    if step == 1:
        model.temperature = 0.5
    if step == 2:
        loss.alpha = 0.9
        model.mask = torch.tensor([1.0, 0, 1, 0, 1, 1]).double()
    if step == 3:
        model.temperature = 1.0
        model.mask[1] = 5.0


def test_a_step_computes_with_what_the_loop_has_changed() -> None:
    torch.manual_seed(0)
    model, loss = Annealed().double(), Weighted()
    eager, plain = copy.deepcopy(model), Weighted()
    optimizer = sgd(eager.parameters())
    batches = [(torch.randn(4, 6).double(), torch.randn(4, 6).double()) for _ in range(5)]
    strategy = [piper.Place(where(), [0]), piper.Split("MB", 2)]
    trainer = Trainer(model, loss, strategy, example=batches[0], optimizer=sgd, device="cpu")

    found, expected = [], []
    for step, (x, y) in enumerate(batches):
        changed(model, loss, step)
        changed(eager, plain, step)
        found.append(trainer.step(x, y).loss)
        optimizer.zero_grad()
        plain_loss = plain(eager(x), y)
        plain_loss.backward()
        optimizer.step()
        expected.append(plain_loss.item())
    trainer.close()

    assert [float(one) for one in found] == pytest.approx(expected, rel=1e-12)


def test_a_number_that_always_changes_is_reported_and_then_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MOST", 6)
    net = Net(lambda self, y: self.t)
    net.t = 0.0
    seen = Watch(net, None)

    def run(steps: int) -> None:
        for _ in range(steps):
            net.t += 0.1
            seen.now()

    with caplog.at_level(logging.WARNING, "piper"):
        run(5)
    with pytest.raises(InputError) as refused:
        run(1)

    assert caplog.messages == [
        "model.t changed 3 times, and each time the model is compiled anew; pass it to the model "
        "with the batch, as a tensor"
    ]
    assert str(refused.value) == (
        "model: model.t changed 6 times, and each time the model was compiled anew\n"
        "  fix: pass it to the model with the batch, as a tensor: torch.tensor(...) without "
        "dimensions is the same for all rows"
    )
