"""What a forward keeps in Python is read anew, carried like a buffer, or refused: never frozen."""

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from draws import one_of
from kept_state import PLACES, Net, Place, X
from torch import Tensor, fx, nn

import piper
from piper import Split, rehearse, where
from piper.capture.trace.forward import trace
from piper.errors import CaptureError


@dataclass(frozen=True)
class Kind:
    """What is kept: how it starts, what it becomes, and how the output is scaled by it."""

    start: Callable[[], Any]
    next: Callable[[Any, Tensor], Any]
    scale: Callable[[Any], Any]


def same(value: Any, y: Tensor) -> Any:
    return value


KINDS = {
    "int": Kind(lambda: 1, lambda n, y: n + 1, lambda n: n),
    "threshold": Kind(lambda: 1, lambda n, y: n + 1, lambda n: 1.0 if n < 1000 else 2.0),
    "float": Kind(lambda: 1.0, lambda t, y: t * 0.5, lambda t: t),
    "bool": Kind(lambda: True, lambda b, y: False, lambda b: 3.0 if b else 1.0),
    "flip": Kind(lambda: True, lambda b, y: not b, lambda b: 3.0 if b else 1.0),
    "str": Kind(lambda: "warm", lambda s, y: "hot", lambda s: {"warm": 1.0, "hot": 2.0}[s]),
    "none": Kind(lambda: None, lambda n, y: 2.0, lambda n: n or 1.0),
    "grown": Kind(list, lambda a, y: [*a, 1], lambda a: 1.0 + len(a)),
    "dict": Kind(dict, lambda d, y: {**d, len(d): 1}, lambda d: 1.0 + sum(d.values())),
    "set": Kind(set, lambda s, y: s | {len(s)}, lambda s: 1.0 + len(s)),
    "tensor": Kind(lambda: None, lambda t, y: y.detach().mean(), lambda t: 1.0 if t is None else t),
    "table": Kind(lambda: None, lambda t, y: y.detach(), lambda t: 1.0 if t is None else t),
    "count": Kind(lambda: itertools.count(1), same, next),
    "iterator": Kind(lambda: iter([1.0, 2.0, 3.0] * 9), same, next),
    "cycle": Kind(lambda: itertools.cycle([1.0, 2.0]), same, next),
    "random": Kind(lambda: random.Random(3), same, lambda r: r.random()),
    "numpy": Kind(lambda: numpy.random.default_rng(3), same, lambda r: float(r.random())),
    "old numpy": Kind(lambda: numpy.random.RandomState(3), same, lambda r: float(r.rand())),
    "array": Kind(lambda: numpy.ones(2), lambda a, y: a + 1, lambda a: float(a[0])),
    "bytes": Kind(lambda: bytearray(b"a"), lambda b, y: b + b"a", lambda b: 1.0 * len(b)),
}


def keeping(place: Place, kind: Kind) -> Net:
    """A model that keeps something of this kind in this place."""

    def read(self: Net, y: Tensor) -> Any:
        value = get(self)
        scale = kind.scale(value)
        put(self, kind.next(value, y))
        return scale

    net = Net(read).double()
    get, put = place(net, kind.start())
    return net


def refused(net: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        trace(net, None, (X.double(),), "cpu")
    return str(caught.value)


def few() -> Iterator[tuple[Place, str]]:
    """Every place and every kind, but not every pair."""
    for number, name in enumerate(KINDS):
        yield PLACES[number % len(PLACES)], name
    yield from zip(PLACES, itertools.cycle(["int", "bool", "tensor"]))


def id_of(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


@one_of(2)
@pytest.mark.parametrize(("place", "name"), list(dict.fromkeys(few())), ids=id_of)
def test_what_the_next_step_would_read_is_refused(place: Place, name: str) -> None:
    message = refused(keeping(place, KINDS[name]))

    assert "which a captured step would not repeat" in message
    assert message.startswith(("test_python_state.py:", "kept_state.py:"))


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("place", PLACES, ids=id_of)
def test_in_every_place_and_of_every_kind(place: Place, name: str) -> None:
    refused(keeping(place, KINDS[name]))


@one_of(2)
@pytest.mark.parametrize("place", PLACES, ids=id_of)
def test_a_trace_leaves_everything_as_it_was(place: Place) -> None:
    net = keeping(place, KINDS["grown"])

    refused(net)

    first = net(X.double()).item()  # the loss is a square
    assert net(X.double()).item() == pytest.approx(first * 4)


class Accepted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.calls, self.table, self.ready = 0, None, False
        self.aux, self.cache, self.width = None, {}, 0
        self.log: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.changed(x)).square().mean()


class CountsOnly(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class CountsAndReassigns(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


class BuildsATable(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6).cos()
        return x * self.table


class BuildsTablesInADict(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        key = x.shape[1]
        if key not in self.cache:
            self.cache[key] = torch.arange(key).sin()
        return x * self.cache[key]


class SetsAFlag(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
        return x


class PassesALoss(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean() * 0.1
        return x + self.aux


class RemembersASize(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        self.width = x.shape[1]
        return x * self.width


class KeepsForTheUser(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return x


class Logs(Accepted):
    lines: list[str] = []

    def changed(self, x: Tensor) -> Tensor:
        if not self.log:
            self.log.append("first")
        return x


class CachedPerShape(Accepted):
    def changed(self, x: Tensor) -> Tensor:
        if getattr(self, "_mask", None) is None or self._mask.shape[0] < x.shape[1]:
            self._mask = torch.ones(x.shape[1], x.shape[1]).tril()[-1]
        return x * self._mask[: x.shape[1]]


@one_of(2)
@pytest.mark.parametrize("make", Accepted.__subclasses__(), ids=lambda cls: cls.__name__)
def test_what_does_not_matter_is_not_refused(make: Callable[[], Accepted]) -> None:
    torch.manual_seed(0)
    net = make().double()
    eager = copy.deepcopy(net)
    expected = [eager(X.double()).item() for _ in range(3)]

    found = trace(net, None, (X.double(),), "cpu")

    weights = [*net.parameters(), *net.buffers()]
    loss, *_ = fx.Interpreter(found.root).run(*weights, X.double(), enable_io_processing=False)
    assert expected == [loss.item()] * 3


class Carries(nn.Module):
    """Keeps tensors from step to step in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.mean, self.moved = torch.zeros(6).double(), torch.ones(6).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) - self.mean
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        self.moved.mul_(0.5).add_(y.detach().mean(0), alpha=0.25)
        return (y * (1 + self.moved)).square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_tensors_are_carried_like_buffers(microbatches: int) -> None:
    torch.manual_seed(0)
    net = Carries().double()
    eager, batches = copy.deepcopy(net), [torch.randn(4, 6).double() for _ in range(4)]
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        parts = [eager(part) / microbatches for part in batch.chunk(microbatches)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(parts).item())

    found = rehearse(
        net, None, [piper.Place(where(), [0]), Split("MB", microbatches)], [(b,) for b in batches],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1), reduction="mean",
    )  # fmt: skip

    assert list(found.losses) == pytest.approx(losses, rel=1e-12)
    assert torch.allclose(found.parameters["mean"], eager.mean, rtol=1e-12)
    assert torch.allclose(found.parameters["moved"], eager.moved, rtol=1e-12)
    assert torch.equal(net.moved, torch.ones(6).double())
    assert set(net.state_dict()) == {"layer.weight", "layer.bias"}


def test_a_write_to_a_tensor_that_is_no_attribute_is_refused() -> None:
    total = torch.zeros(())

    def read(self: Net, y: Tensor) -> Tensor:
        total.add_(y.detach().sum())
        return total

    message = refused(Net(read))

    assert "the forward writes to a tensor that is not an argument or a buffer" in message
