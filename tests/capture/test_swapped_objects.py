"""A forward that exchanges what its next run finds: modules, the order of dicts, iterators."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import piper
from piper.errors import CaptureError

SGD = partial(torch.optim.SGD, lr=0.1)
ORDER = OrderedDict.fromkeys([1.0, 2.0, 3.0])


class Scale:
    """Two of them hold the same, but for its number."""

    def __init__(self, by: float) -> None:
        self.by = by


class Model(nn.Module):
    def __init__(self, change: Callable[[Any], float | None]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.chain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.now = self.heads[0]
        self.run = self.one.forward
        self.scales = [Scale(1.0), Scale(2.0)]
        self.scale = self.scales[0]
        self.order, self.table = OrderedDict.fromkeys([1.0, 2.0]), {"a": 1.0, "b": 2.0}
        self.steps: Iterator[Any] = iter(())
        self.kept = torch.zeros(1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        factor = self.change(self)
        h = self.run(self.chain(self.heads[0](self.now(self.other(self.one(x))))))
        first = next(iter(self.order)) * next(iter(self.table.values())) * next(iter(ORDER))
        return h * self.scale.by * first * (1.0 if factor is None else factor) * (1 + self.kept)


def swap(m: Any) -> None:
    m.one, m.other = m.other, m.one


def swap_in_list(m: Any) -> None:
    m.heads[0], m.heads[1] = m.heads[1], m.heads[0]


def swap_in_chain(m: Any) -> None:
    m.chain[0], m.chain[2] = m.chain[2], m.chain[0]


def turn(m: Any) -> None:
    m.heads = nn.ModuleList([*m.heads[1:], m.heads[0]])


def point(m: Any) -> None:
    m.now = m.heads[1] if m.now is m.heads[0] else m.heads[0]


def point_to_method(m: Any) -> None:
    m.run = m.other.forward if m.run == m.one.forward else m.one.forward


def point_to_object(m: Any) -> None:
    m.scale = m.scales[1] if m.scale is m.scales[0] else m.scales[0]


def move_to_end(m: Any) -> None:
    m.order.move_to_end(next(iter(m.order)))


def insert_again(m: Any) -> None:
    key = next(iter(m.table))
    m.table[key] = m.table.pop(key)


def move_global(m: Any) -> None:
    ORDER.move_to_end(next(iter(ORDER)))


def write_array(m: Any) -> None:
    m.kept.numpy()[0] += 0.1


SWAPS = [
    swap, swap_in_list, swap_in_chain, turn, point, point_to_method, point_to_object, move_to_end,
    insert_again, move_global, write_array,
]  # fmt: skip
NUMBERS = (1.0, 2.0, 3.0, 4.0, 5.0)
ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "map": lambda: map(float, NUMBERS),
    "map of map": lambda: map(float, map(str, NUMBERS)),
    "zip": lambda: zip(NUMBERS, NUMBERS, strict=True),
    "zip of a generator": lambda: zip((n for n in NUMBERS), NUMBERS, strict=True),
    "filter": lambda: filter(None, NUMBERS),
    "starmap": lambda: itertools.starmap(max, zip(NUMBERS, NUMBERS, strict=True)),
    "takewhile": lambda: itertools.takewhile(bool, NUMBERS),
    "dropwhile": lambda: itertools.dropwhile(lambda n: n < 1, NUMBERS),
    "zip_longest": lambda: itertools.zip_longest(NUMBERS, NUMBERS),
    "chain": lambda: itertools.chain(NUMBERS, NUMBERS),
    "chain of zip": lambda: itertools.chain(zip(NUMBERS, NUMBERS, strict=True)),
    "islice": lambda: itertools.islice(NUMBERS, 4),
    "pairwise": lambda: itertools.pairwise(NUMBERS),
    "compress": lambda: itertools.compress(NUMBERS, itertools.repeat(1)),
    "accumulate": lambda: itertools.accumulate(NUMBERS),
    "tee": lambda: itertools.tee(NUMBERS)[0],
    "groupby": lambda: itertools.groupby(NUMBERS),
    "filterfalse": lambda: itertools.filterfalse(lambda n: n > 9, NUMBERS),
    "enumerate": lambda: enumerate(map(float, NUMBERS), 1),
    "reversed": lambda: reversed(NUMBERS),
    "cycle": lambda: itertools.cycle(NUMBERS),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, 4, 3, generator=generator).unbind()) for _ in range(3)]


@one_of(4)
@pytest.mark.parametrize("change", SWAPS, ids=lambda change: change.__name__)
def test_what_a_forward_exchanges_is_seen(change: Callable[[Any], None]) -> None:
    with pytest.raises(CaptureError):
        piper.rehearse(Model(change), mse_loss, None, batches())


@one_of(8)
@pytest.mark.parametrize("name", ITERATORS)
def test_what_a_forward_takes_from_an_iterator_is_seen(name: str) -> None:
    def take(m: Any) -> float:
        found = next(m.steps)
        return float(found[0] if isinstance(found, tuple) else found)

    model = Model(take)
    model.steps = ITERATORS[name]()

    with pytest.raises(CaptureError, match=r"the forward changes model.steps|cannot be copied"):
        piper.rehearse(model, mse_loss, None, batches())


def back_and_forth(m: Any) -> None:
    swap(m)
    swap(m)


def same_order(m: Any) -> None:
    m.table.update(dict(m.table))


def new_object(m: Any) -> None:
    m.scale = Scale(2.0)


def read_array(m: Any) -> float:
    return float(m.kept.numpy()[0]) + float(numpy.asarray(m.kept).sum()) + 2.0


@one_of(4)
@pytest.mark.parametrize(
    "change", [back_and_forth, same_order, new_object, read_array], ids=lambda one: one.__name__
)
def test_what_is_the_same_for_the_next_forward_trains(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = Model(change)
    model.kept = torch.tensor([0.5])
    alone = copy.deepcopy(model)
    alone.run, alone.now = alone.one.forward, alone.heads[0]
    wanted = plain_losses(SGD(alone.parameters()), batches(), lambda x, y: mse_loss(alone(x), y))

    found = piper.rehearse(model, mse_loss, None, batches(), optimizer=SGD)

    assert found.losses == pytest.approx(wanted, rel=1e-5)
