"""Objects of torch and Python that a forward asks: what they answer later is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.capture.python_state.watch import Watch
from piper.errors import CaptureError

SCALE = 1.0
SGD = partial(torch.optim.SGD, lr=0.5)


class Net(nn.Module):
    """`factor` is kept where the trace finds it by its code only."""

    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(4, 4, dtype=torch.float64), factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.factor()


def scaled() -> Generator[float, float | None, None]:
    value = 1.0
    while True:
        value = (yield value) or value


def mode() -> tuple[Callable[[], Any], Callable[[], Any]]:
    other = nn.Dropout().eval()
    return lambda: 2 if other.training else 1, other.train


def option() -> tuple[Callable[[], Any], Callable[[], Any]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    groups = optimizer.param_groups
    return lambda: optimizer.param_groups[0]["lr"], lambda: groups[0].update(lr=2.0)


def scheduler() -> tuple[Callable[[], Any], Callable[[], Any]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.step()
    found = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return lambda: found.get_last_lr()[0], found.step


def generator() -> tuple[Callable[[], Any], Callable[[], Any]]:
    found = scaled()
    next(found)
    return lambda: found.gi_frame.f_locals["value"], lambda: found.send(2.0)


def event() -> tuple[Callable[[], Any], Callable[[], Any]]:
    found = threading.Event()
    return lambda: 2 if found.is_set() else 1, found.set


def lock() -> tuple[Callable[[], Any], Callable[[], Any]]:
    found = threading.Lock()
    return lambda: 2 if found.locked() else 1, found.acquire


def semaphore() -> tuple[Callable[[], Any], Callable[[], Any]]:
    found = threading.Semaphore(5)
    return lambda: found._value, found.acquire


def by_text() -> tuple[Callable[[], Any], Callable[[], Any]]:
    globals()["SCALE"] = 1.0
    return lambda: globals()["SCALE"], lambda: globals().update(SCALE=2.0)


def evaluated() -> tuple[Callable[[], Any], Callable[[], Any]]:
    globals()["SCALE"] = 1.0
    return lambda: eval("3 * SCALE"), lambda: globals().update(SCALE=2.0)


KEPT = [
    mode, option, scheduler, generator, event, lock, semaphore, by_text, evaluated,
]  # fmt: skip


@pytest.mark.parametrize("kept", KEPT)
def test_what_an_object_answers_later_is_seen(kept: Callable[[], tuple[Any, Any]]) -> None:
    factor, change = kept()
    net = Net(factor)
    seen = Watch(net, None)
    before = factor()

    assert seen.now() == 0
    change()

    assert factor() != before
    assert seen.now() != 0


class Late(nn.Module):
    """Registers what it needs when it runs for the first time."""

    def __init__(self, first: bool, parameter: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.first, self.parameter = first, parameter

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        if hasattr(self, "table"):
            return h * self.table
        table = torch.arange(1, 5, dtype=torch.float64)
        if self.parameter:
            self.register_parameter("table", nn.Parameter(table, requires_grad=False))
        else:
            self.register_buffer("table", table, persistent=False)
        return h * self.table if self.first else h


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 6, 4, dtype=torch.float64, generator=draw)
    return x, y


def test_a_buffer_that_a_forward_registers_may_not_change_the_next_one() -> None:
    with pytest.raises(CaptureError, match="the forward changes model.table"):
        rehearse(Late(first=False), F.mse_loss, None, [batch(0)], optimizer=SGD)


@pytest.mark.parametrize("parameter", [False, True], ids=["buffer", "parameter"])
def test_a_table_that_a_forward_registers_is_as_in_eager_training(parameter: bool) -> None:
    plain, batches = Late(True, parameter), [batch(seed) for seed in range(3)]
    losses = plain_losses(
        SGD(plain.layer.parameters()), batches, lambda x, y: F.mse_loss(plain(x), y)
    )

    found = rehearse(Late(True, parameter), F.mse_loss, None, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, wanted in plain.layer.state_dict().items():
        torch.testing.assert_close(found.parameters[f"layer.{name}"], wanted)
