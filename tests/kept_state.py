"""Models that keep something in Python, in any of many places."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

X = torch.linspace(-1, 1, 12).view(2, 6)
KEPT: Any = None  # the global of `in_a_global`


class Net(nn.Module):
    """Scales its output by what `read` returns."""

    def __init__(self, read: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y * self.read(self, y)).square().mean()


Get, Put = Callable[[], Any], Callable[[Any], None]
Place = Callable[[Net, Any], tuple[Get, Put]]


def in_an_attribute(net: Net, start: Any) -> tuple[Get, Put]:
    net.kept = start

    def read(self: Net) -> Any:
        return self.kept

    def write(self: Net, value: Any) -> None:
        self.kept = value

    return read, write


def in_a_field(net: Net, start: Any) -> tuple[Get, Put]:
    net.box = SimpleNamespace(inner=SimpleNamespace(kept=start))

    def write(self: Net, value: Any) -> None:
        self.box.inner.kept = value

    return (lambda self: self.box.inner.kept), write


def in_an_item(net: Net, start: Any) -> tuple[Get, Put]:
    net.table = {"a": [0, start]}

    def write(self: Net, value: Any) -> None:
        self.table["a"][1] = value

    return (lambda self: self.table["a"][1]), write


def in_a_tuple(net: Net, start: Any) -> tuple[Get, Put]:
    net.pair = (0, start)

    def write(self: Net, value: Any) -> None:
        self.pair = (0, value)

    return (lambda self: self.pair[1]), write


def in_a_deque(net: Net, start: Any) -> tuple[Get, Put]:
    net.queue = deque([start], maxlen=1)
    return (lambda self: self.queue[0]), (lambda self, value: self.queue.append(value))


def in_a_class(net: Net, start: Any) -> tuple[Get, Put]:
    class Settings:
        kept = start

    def write(self: Net, value: Any) -> None:
        Settings.kept = value

    return (lambda self: Settings.kept), write


def in_its_own_class(net: Net, start: Any) -> tuple[Get, Put]:
    class Other(Net):
        kept = start

    def write(self: Net, value: Any) -> None:
        type(self).kept = value

    net.__class__ = Other
    return (lambda self: self.kept), write


def in_a_global(net: Net, start: Any) -> tuple[Get, Put]:
    global KEPT
    KEPT = start

    def write(self: Net, value: Any) -> None:
        global KEPT
        KEPT = value

    return (lambda self: KEPT), write


def in_a_closure(net: Net, start: Any) -> tuple[Get, Put]:
    kept = start

    def write(self: Net, value: Any) -> None:
        nonlocal kept
        kept = value

    return (lambda self: kept), write


def in_a_default(net: Net, start: Any) -> tuple[Get, Put]:
    held = [start]

    def read(self: Net, kept: list[Any] = held) -> Any:
        return kept[0]

    def write(self: Net, value: Any, kept: list[Any] = held) -> None:
        kept[0] = value

    return read, write


def on_a_function(net: Net, start: Any) -> tuple[Get, Put]:
    def read(self: Net) -> Any:
        return read.kept

    def write(self: Net, value: Any) -> None:
        read.kept = value

    read.kept = start
    return read, write


def in_a_submodule(net: Net, start: Any) -> tuple[Get, Put]:
    net.layer.kept = start

    def write(self: Net, value: Any) -> None:
        self.layer.kept = value

    return (lambda self: self.layer.kept), write


PLACES: list[Place] = [
    in_an_attribute, in_a_field, in_an_item, in_a_tuple, in_a_deque, in_a_class, in_its_own_class,
    in_a_global, in_a_closure, in_a_default, on_a_function, in_a_submodule,
]  # fmt: skip
