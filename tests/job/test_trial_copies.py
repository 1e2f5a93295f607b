"""Trials of one model share a copy of it, if a run leaves the copy as it was."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.trace.trials import trial_copy
from piper.capture.trace.trials.trial_run import TrialRuns, gradients

ROWS, WIDTH = 4, 3


class Net(nn.Module):
    """Multiplies by how often it was called, as one of its attributes counts it."""

    def __init__(self, count: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.count, self.last = nn.Linear(WIDTH, WIDTH), count, 0
        self.array, self.tensor = numpy.zeros(1), torch.zeros(1)
        self.words, self.unknown = set[int](), bytearray(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 if self.count is None else self.count(self))


def by_a_number(net: Net) -> int:
    net.last += 1
    return net.last


def by_an_array(net: Net) -> float:
    net.array += 1
    return float(net.array[0])


def by_a_tensor(net: Net) -> float:
    net.tensor += 1
    return float(net.tensor)


def by_a_set(net: Net) -> int:
    net.words.add(len(net.words))
    return len(net.words)


def by_bytes(net: Net) -> int:
    net.unknown[0] += 1
    return net.unknown[0]


def by_a_new_buffer(net: Net) -> int:
    net.register_buffer(f"more_{len(list(net.buffers()))}", torch.zeros(1))
    return len(list(net.buffers()))


@lru_cache
def remembered(rows: int) -> list[int]:
    return [rows]


def by_a_function(net: Net) -> int:
    remembered(1)[0] += 1
    return remembered(1)[0] - 1


COUNTS = [
    by_a_number,
    by_an_array,
    by_a_tensor,
    by_a_set,
    by_bytes,
    by_a_new_buffer,
    by_a_function,
]


def runs_of(model: Net) -> TrialRuns:
    return TrialRuns(model, F.mse_loss, dict(model.named_parameters()).__getitem__)


def batch() -> tuple[Tensor, Tensor]:
    draw = partial(torch.randn, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return draw(), draw()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were copied."""
    made, copy = list[nn.Module](), trial_copy.throw_away
    monkeypatch.setattr(
        trial_copy, "throw_away", lambda m, *more: (made.append(m), copy(m, *more))[1]
    )
    return made


@pytest.mark.parametrize("count", COUNTS)
def test_each_run_is_the_first(count: Any) -> None:
    model = Net(count)
    runs, plain = runs_of(model), runs_of(Net())
    wanted = plain.run(batch(), None, calls=False).loss

    assert [runs.run(batch(), None, calls=False).loss for _ in range(3)] == [wanted] * 3
    assert count(model) == 1


def test_a_copy_is_shared(copies: list[nn.Module]) -> None:
    runs = runs_of(Net())
    x, y = batch()
    for _ in range(4):
        runs.run((x.double(), y.double()), torch.float64, calls=False)
    assert len(copies) == 1
    runs.run((x, y), None, calls=False)
    assert len(copies) == 2


def test_a_run_that_fails_leaves_no_copy(copies: list[nn.Module]) -> None:
    runs = runs_of(Net())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            runs.run((torch.zeros(ROWS, WIDTH + 1), torch.zeros(ROWS, WIDTH)), None, calls=False)
    assert len(copies) == 2


def test_gradients_are_those_of_plain_pytorch() -> None:
    model = Net()
    runs, (x, y) = runs_of(model), batch()
    with torch.no_grad():
        trial = runs.run((x, y), None, calls=False, derived=True)
    found = gradients(trial, 0.5)

    leaves = {name: one.clone().requires_grad_() for name, one in runs.parameters.items()}
    loss = 0.5 * F.mse_loss(torch.func.functional_call(model, leaves, x), y)
    wanted = torch.cat([one.flatten() for one in torch.autograd.grad(loss, [*leaves.values()])])
    torch.testing.assert_close(found, wanted.double())
