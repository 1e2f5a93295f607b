"""Code that asks which module it is: by `is`, by its id, by a weak reference, as a key."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Trainer, where

BATCHES = [(torch.linspace(-1, k, 8).view(2, 4), k * torch.ones(2, 4)) for k in (1, 2)]
X, Y = BATCHES[0]
SGD = partial(torch.optim.SGD, lr=0.1)
SCALES: dict[Any, float] = {}
WEAK: Any = weakref.WeakKeyDictionary()
LIVE: Any = weakref.WeakSet()


class Layer(nn.Module):
    """Doubles its result if it recognises itself, as `setup` has left it."""

    def __init__(self, knows: Callable[[Layer], Any]) -> None:
        super().__init__()
        self.a, self.knows = nn.Linear(4, 4), knows

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (2.0 if self.knows(self) else 1.0)


class Net(nn.Module):
    def __init__(self, knows: Callable[[Layer], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(knows), Layer(knows)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_id() -> Net:
    net = Net(lambda layer: id(layer) in SCALES)
    SCALES.clear()  # a model that is gone may have had the same ids
    SCALES[id(net.layers[1])] = 2.0
    return net


def by_key() -> Net:
    net = Net(lambda layer: layer in SCALES)
    SCALES[net.layers[1]] = 2.0
    return net


def by_weak_key() -> Net:
    net = Net(lambda layer: layer in WEAK)
    WEAK[net.layers[1]] = 2.0
    return net


def by_weak_set() -> Net:
    net = Net(lambda layer: layer in LIVE)
    LIVE.add(net.layers[1])
    return net


def by_own_id() -> Net:
    net = Net(lambda layer: layer.me == id(layer))
    for layer in net.layers:
        layer.me = id(net.layers[1])
    return net


def by_reference() -> Net:
    net = Net(lambda layer: layer.me() is layer)
    for layer in net.layers:
        layer.me = weakref.ref(net.layers[1])
    return net


def by_closure() -> Net:
    net = Net(lambda layer: layer is last[0])
    last = [net.layers[1]]
    return net


def by_closure_of_the_model() -> Net:
    held: list[Net] = []
    net = Net(lambda layer: layer is held[0].layers[1])
    held.append(net)
    return net


def by_default() -> Net:
    net = Net(lambda layer: False)
    last = net.layers[1]

    def knows(layer: Layer, other: nn.Module = last) -> bool:
        return layer is other

    for layer in net.layers:
        layer.knows = knows
    return net


FORMS = [by_id, by_key, by_weak_key, by_weak_set, by_own_id, by_reference, by_closure,
         by_closure_of_the_model, by_default]  # fmt: skip


def plain(model: nn.Module) -> list[float]:
    optimizer = SGD(model.parameters())
    return plain_losses(optimizer, BATCHES, lambda x, y: F.mse_loss(model(x), y))


@one_of(2)
@pytest.mark.parametrize("make", every(2, FORMS))
def test_a_module_recognises_itself(make: Callable[[], Net]) -> None:
    expected = plain(make())
    trainer = Trainer(
        make(), F.mse_loss, [Place(where(), [0])], example=(X, Y), device="cpu", optimizer=SGD
    )
    found = [trainer.step(*batch).loss for batch in BATCHES]
    trainer.close()

    assert found == pytest.approx(expected, rel=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = by_closure()
    before = [*model.modules()]

    trainer = Trainer(model, F.mse_loss, [Place(where(), [0])], example=(X, Y), device="cpu")
    trainer.step(X, Y)
    trainer.close()

    assert all(a is b for a, b in zip(before, model.modules(), strict=True))
    assert all(layer is model.layers[k] for k, layer in enumerate(before[2::2]))
