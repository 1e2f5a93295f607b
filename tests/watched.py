"""What a forward reads is watched: another value gives another state, and the first one is back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.functional import mse_loss

from piper.capture.python_state.watch import Watch

Undo = Callable[[], Any]
ABSENT = object()


def set_to(owner: Any, name: str, value: Any) -> Undo:
    before = vars(owner).get(name, ABSENT)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if before is ABSENT else setattr(owner, name, before)


@contextmanager
def undone(undo: Undo) -> Iterator[None]:
    try:
        yield
    finally:
        undo()


def assert_watched(net: nn.Module, read: Callable[[Any], Any], change: Callable[[], Undo]) -> None:
    seen, first = Watch(net, mse_loss), read(net)
    assert seen.now() == 0

    with undone(change()):
        assert read(net) != first
        assert seen.now() != 0
    assert seen.now() == 0
