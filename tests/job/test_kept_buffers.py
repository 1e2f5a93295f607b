"""Buffers that a forward only updates: whether microbatches leave what the whole batch leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, rehearse, where
from piper.job.loss import trial_size

WIDTH, ROWS = 4, 8
SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self, update: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(3 * ROWS, WIDTH))
        self.double()
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.update(self, h)
        return self.last(h)


def moving(net: nn.Module, h: Tensor) -> None:
    net.kept.mul_(0.9).add_(h.mean(0), alpha=0.1)


def assigned(net: nn.Module, h: Tensor) -> None:
    net.kept = 0.9 * net.kept + 0.1 * h.mean(0)


def calls(net: nn.Module, h: Tensor) -> None:
    net.count += 1


def rows(net: nn.Module, h: Tensor) -> None:
    net.count += len(h)


def summed(net: nn.Module, h: Tensor) -> None:
    net.kept += h.sum(0)


def of_means(net: nn.Module, h: Tensor) -> None:
    net.kept += h.mean(0)


def largest(net: nn.Module, h: Tensor) -> None:
    torch.maximum(net.kept, h.abs().amax(0), out=net.kept)


def last(net: nn.Module, h: Tensor) -> None:
    net.kept.copy_(h[-1])


def first(net: nn.Module, h: Tensor) -> None:
    net.kept.copy_(h[0])


def queued(net: nn.Module, h: Tensor) -> None:
    net.queue.copy_(torch.cat([h, net.queue])[: len(net.queue)])


def rolled(net: nn.Module, h: Tensor) -> None:
    net.queue.copy_(torch.cat([net.queue, h])[-len(net.queue) :])


def variance(net: nn.Module, h: Tensor) -> None:
    net.kept.lerp_(h.var(0, unbiased=False), 0.1)


UPDATES = [
    moving, assigned, calls, rows, summed, of_means, largest, last, first, queued, rolled, variance,
]  # fmt: skip
SIZES = [(2, 1), (4, 1), (1, 2), (2, 2)]  # microbatches, replicas


def left(net: nn.Module, x: Tensor, parts: int) -> list[Tensor]:
    net = copy.deepcopy(net)
    for one in x.chunk(parts):
        net(one)
    return list(net.buffers())


@one_of(32)
@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(("parts", "replicas"), SIZES)
@pytest.mark.parametrize("update", UPDATES, ids=lambda one: one.__name__)
def test_other_values_are_warned_of(
    update: Callable[[nn.Module, Tensor], None],
    parts: int,
    replicas: int,
    is_large: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of large models, only sums and largest rows of microbatches are warned of without need."""
    monkeypatch.setattr(trial_size, "LIMIT", 0 if is_large else trial_size.LIMIT)
    net, devices = Net(update), list(range(replicas))
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = left(net, x.chunk(replicas)[0], parts)
    same = all(map(torch.allclose, left(net, x, 1), alone))

    strategy = [Place(where(), devices), Split("MB", parts)]
    strategy += [Replicate(where(), devices)] if replicas > 1 else []
    rehearse(net, F.mse_loss, strategy, [(x, x)], optimizer=SGD)

    said = "does not compute with" in caplog.text
    assert said != same or (said and is_large), caplog.text


@one_of(2)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)])
def test_statistics_of_batch_norms_are_known(
    norm: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)
    x = torch.randn(ROWS, WIDTH)
    rehearse(net, F.mse_loss, [Place(where(), [0]), Split("MB", 2)], [(x, x)], optimizer=SGD)

    assert "does not compute with" not in caplog.text


def test_one_microbatch_is_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    rehearse(Net(moving), F.mse_loss, [Place(where(), [0])], [(x, x)], optimizer=SGD)

    assert "does not compute with" not in caplog.text
