"""What a forward changes outside of the model and reads there: a captured step does it once."""

from __future__ import annotations

import decimal
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Trainer, rehearse
from piper.errors import CaptureError

VARIABLE = "PIPER_TEST_STEPS"


class Net(nn.Module):
    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(6, 3), count

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.count()


class Turning(nn.Module):
    """Its children change places, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Tanh()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.children():
            x = layer(x)
        self.layers._modules["a"] = self.layers._modules.pop("a")
        return x[:, :3]


def in_the_environment() -> int:
    os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, "0")) + 1)
    return int(os.environ[VARIABLE])


def in_a_file(path: Path) -> int:
    found = int(path.read_text()) if path.exists() else 0
    path.write_text(str(found + 1))
    return found + 1


def in_decimals() -> int:
    decimal.getcontext().prec += 1
    return decimal.getcontext().prec


def in_the_limit() -> int:
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    return sys.getrecursionlimit()


def in_the_type() -> int:
    double = torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32 if double else torch.float64)
    return 1 + double


HERE = threading.local()


def in_the_thread() -> int:
    HERE.steps = getattr(HERE, "steps", 0) + 1
    return int(HERE.steps)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "0")
    precision, limit = decimal.getcontext().prec, sys.getrecursionlimit()
    yield
    torch.set_default_dtype(torch.float32)
    decimal.getcontext().prec = precision
    sys.setrecursionlimit(limit)


COUNTS = {
    r"os.environ\['PIPER_TEST_STEPS'\]": in_the_environment,
    "decimal.getcontext": in_decimals,
    "sys.getrecursionlimit": in_the_limit,
    "HERE": in_the_thread,
    "torch.get_default_dtype": in_the_type,
}


def refused(model: nn.Module, what: str) -> None:
    with pytest.raises(CaptureError, match=f"changes {what}"):
        rehearse(model, F.mse_loss, None, [(torch.randn(8, 6), torch.randn(8, 3))])


@one_of(2)
@pytest.mark.parametrize(("what", "count"), COUNTS.items(), ids=COUNTS)
def test_a_forward_that_counts_outside_is_refused(what: str, count: Callable[[], int]) -> None:
    refused(Net(count), what)


@pytest.mark.parametrize("first", [None, "3"], ids=["new", "known"])
def test_so_is_one_that_counts_in_a_file(first: str | None, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    if first is not None:
        path.write_text(first)
    refused(Net(partial(in_a_file, path)), "the file")


def test_so_is_one_whose_children_change_places() -> None:
    refused(Turning(), "model.layers")


def in_bytes() -> int:
    return len(os.environb.get(VARIABLE.encode(), b""))


def in_a_subprocess() -> int:
    """Which asks for names of both types."""
    os.get_exec_path()
    return len(os.environ.get(VARIABLE, ""))


@pytest.mark.parametrize("read", [in_bytes, in_a_subprocess])
def test_a_variable_is_read_in_each_step(
    read: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    torch.manual_seed(0)
    model, copied = Net(read), Net(read)
    copied.load_state_dict(model.state_dict())
    sgd, found = partial(torch.optim.SGD, lr=0.1), []
    with Trainer(copied, F.mse_loss, None, example=(x, y), optimizer=sgd, device="cpu") as trainer:
        for text in ("1", "22", "1"):
            monkeypatch.setenv(VARIABLE, text)
            found.append(trainer.step(x, y).loss)
    optimizer, expected = sgd(model.parameters()), []
    for text in ("1", "22", "1"):
        monkeypatch.setenv(VARIABLE, text)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    assert found == pytest.approx(expected, rel=1e-5)
