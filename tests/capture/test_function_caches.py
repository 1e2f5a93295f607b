"""Functions that remember tables: a trace leaves nothing in them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn

import piper
from piper.capture.cache.folder import folder_at  # noqa: F401  (a cache of Piper, in this module)
from piper.capture.python_state.function_caches import forgetting, function_caches, looking_once


@functools.lru_cache(maxsize=2)
def table(size: int) -> Tensor:
    return torch.linspace(1, 2, size, dtype=torch.float64)


@functools.cache
def weights(rows: int) -> Tensor:
    return torch.full((rows, 1), 0.5, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    @functools.lru_cache  # noqa: B019
    def positions(self, size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * table(6) + self.positions(6)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).square() * weights(len(output))).mean()


@pytest.mark.parametrize("warm", [False, True], ids=["new", "called before"])
def test_tables_that_functions_remember_are_as_in_eager_training(warm: bool) -> None:
    for one in (table, weights, Net.positions):
        one.cache_clear()
    model, (x, y) = Net().double(), torch.randn(2, 4, 6).double()
    wanted = loss_fn(model(x), y).item() if warm else None

    make = partial(piper.Trainer, model, loss_fn, None, device="cpu")
    with closing(make(example=(x, y), optimizer=partial(torch.optim.SGD, lr=0.0))) as trainer:
        losses = [trainer.step(x, y).loss, trainer.evaluate([(x, y)]).loss]
        trainer.step(x[:2], y[:2])  # another shape: traced again

    wanted = loss_fn(model(x), y).item() if wanted is None else wanted
    assert losses == [pytest.approx(wanted, rel=1e-12)] * 2
    assert type(table(6)) is type(weights(4)) is type(model.positions(6)) is Tensor


def in_a_closure() -> nn.Module:
    @functools.lru_cache
    def own(size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float64)

    class Inner(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * own(6)

    return Inner()


def in_an_attribute() -> nn.Module:
    class Inner(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.own(6)

    model = Inner()
    model.own = functools.cache(lambda size: torch.arange(size, dtype=torch.float64))
    return model


@pytest.mark.parametrize("make", [in_a_closure, in_an_attribute])
def test_tables_of_functions_that_no_module_has(make: Callable[[], nn.Module]) -> None:
    (x, y), sgd = torch.randn(2, 4, 6).double(), partial(torch.optim.SGD, lr=0.1)
    model = make().double()
    expected = plain_losses(
        sgd(model.parameters()), [(x, y)] * 3, lambda x, y: loss_fn(model(x), y)
    )
    own, halves = make().double(), [piper.Place(piper.where(), [0]), piper.Split("MB", 2)]

    given = partial(piper.Trainer, own, loss_fn, halves, example=(x, y), device="cpu")
    with closing(given(optimizer=sgd)) as trainer:
        losses = [trainer.step(x, y).loss for _ in range(3)]

    assert losses == pytest.approx(expected, rel=1e-12)


def test_a_module_that_comes_later_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    later = ModuleType("later")
    later.__file__, later.table = __file__, functools.cache(torch.zeros)  # type: ignore[attr-defined]
    assert table in function_caches() and later.table not in function_caches()

    with forgetting():
        monkeypatch.setitem(sys.modules, "later", later)
        later.table(3)
    assert later.table.cache_info().currsize == 0
    monkeypatch.setitem(sys.modules, "later", ModuleType("later"))  # another, in its place
    assert later.table not in function_caches()


def test_one_inside_another_forgets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And finds modules that are new inside, though the outer one has looked already."""
    later, looks = ModuleType("later"), list[int]()
    later.__file__, later.table = __file__, functools.cache(torch.zeros)  # type: ignore[attr-defined]
    look = look_at_all(monkeypatch, looks)
    weights.cache_clear()

    with forgetting():
        for rows in (1, 2):
            with forgetting():
                weights(rows)
            assert weights.cache_info().currsize == 0
        assert len(looks) == 1
        with forgetting():
            monkeypatch.setitem(sys.modules, "later", later)
            later.table(3)
        assert later.table.cache_info().currsize == 0
        weights(3)
    assert weights.cache_info().currsize == 0 and len(looks) == 3
    with forgetting():
        assert later.table in look() and len(looks) == 5


def test_several_that_are_put_together_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forgets what was remembered inside of it. What is new at the end is forgotten, too."""
    looks, name = list[int](), "new_table"
    look_at_all(monkeypatch, looks)
    table.cache_clear(), weights.cache_clear()

    with looking_once(), looking_once():
        assert not looks
        for rows in (1, 2):
            with forgetting():
                weights(rows)
            assert weights.cache_info().currsize == 0
        monkeypatch.setitem(globals(), name, functools.cache(torch.zeros))
        globals()[name](3), table(3)
    assert len(looks) == 2 and globals()[name].cache_info().currsize == 0
    assert table.cache_info().currsize == 1  # outside of both

    with forgetting(), looking_once(), forgetting():
        weights(3)
    assert weights.cache_info().currsize == 0 and len(looks) == 4


def look_at_all(monkeypatch: pytest.MonkeyPatch, looks: list[int]) -> Any:
    """All modules are looked at, and how often is counted."""
    plain = function_caches

    def counted() -> list[Any]:
        looks.append(1)
        return plain()

    monkeypatch.setattr("piper.capture.python_state.function_caches.function_caches", counted)
    return counted


def test_what_piper_remembers_is_not_the_users() -> None:
    """Also where Piper lies in a folder of the user, as it does here."""
    rooms = {one.__module__.split(".")[1] for one in function_caches() if is_pipers(one)}

    assert rooms <= {"models"}


def is_pipers(function: Any) -> bool:
    return str(function.__module__).startswith("piper.")
