"""Functions of libraries around the user's own: decorators, and what else calls his code."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from contextlib import ContextDecorator, contextmanager
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from watched import Undo, assert_watched, set_to

from piper import Trainer
from piper.capture import capture
from piper.capture.python_state.watch import Watch
from piper.errors import CaptureError

FACTOR, KEPT = 1.0, types.SimpleNamespace(factor=1.0, w=1.0)
here = sys.modules[__name__]


class Plainly(ContextDecorator):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def entered(function: Callable[[], Any]) -> Callable[[], Any]:
    @contextmanager
    def scope() -> Any:
        yield function()

    def enter() -> Any:
        with scope() as found:
            return found

    return enter


def dispatched(function: Callable[[], Any]) -> Callable[[], Any]:
    @functools.singledispatch
    def by_kind(_: Any) -> Any:
        raise TypeError

    by_kind.register(int)(lambda _: function())
    return lambda: by_kind(3)


def missing(function: Callable[[], Any]) -> Callable[[], Any]:
    made = defaultdict(function)

    def find() -> Any:
        found = made["key"]
        del made["key"]
        return found

    return find


DECORATORS: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad(),
    "enable_grad": torch.enable_grad(),
    "autocast": torch.autocast("cpu", enabled=False),
    "profiled": torch.autograd.profiler.record_function("name"),
    "not compiled": torch.compiler.disable,
    "context": Plainly(),
    "entered": entered,
    "dispatched": dispatched,
    "partial": functools.partial,
    "default": missing,
    "two": lambda function: torch.no_grad()(Plainly()(function)),
    "four": lambda function: Plainly()(torch.no_grad()(Plainly()(torch.no_grad()(function)))),
}


class Net(nn.Module):
    def __init__(self, how: Callable[[Any], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.how = nn.Linear(3, 3, dtype=torch.float64), how

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.how(self)


def read_global() -> float:
    return FACTOR


def read_object() -> float:
    return KEPT.factor


@pytest.mark.parametrize("name", DECORATORS)
def test_what_a_decorated_function_reads_is_watched(name: str) -> None:
    for function, owner, key in ((read_global, here, "FACTOR"), (read_object, KEPT, "factor")):
        decorated = DECORATORS[name](function)
        read = lambda net, run=decorated: run()  # noqa: E731
        assert_watched(Net(read), read, functools.partial(set_to, owner, key, 2.0))


def counts() -> float:
    KEPT.factor += 1.0
    return KEPT.factor


@pytest.mark.parametrize("name", ["no_grad", "entered", "dispatched", "default", "four"])
def test_what_a_decorated_function_changes_is_refused(name: str) -> None:
    run = DECORATORS[name](counts)
    with pytest.raises(CaptureError, match=r"test_watched_decorators.py:\d+: the forward changes"):
        capture(Net(lambda net: run()), mse_loss, batch(0))
    assert KEPT.factor == 1.0


VARIABLE = contextvars.ContextVar("variable", default=KEPT)
COMPUTED = types.ModuleType("computed_of_a_test")
TEXT = """
held = {'factor': 1.0}
def __getattr__(name):
    if name not in held:
        raise AttributeError(name)
    return held[name]
"""
exec(TEXT, vars(COMPUTED))  # noqa: S102


def set_held(value: float) -> Undo:
    COMPUTED.held["factor"] = value
    return lambda: set_held(1.0)


OTHERS: dict[str, tuple[Callable[[Any], float], Callable[[], Undo]]] = {
    "default of a context variable": (
        lambda net: VARIABLE.get().factor, lambda: set_to(KEPT, "factor", 2.0),
    ),
    "computed by a module": (lambda net: COMPUTED.factor, lambda: set_held(2.0)),
    "name of one letter": (lambda net: getattr(KEPT, "w"), lambda: set_to(KEPT, "w", 2.0)),  # noqa: B009
    "later attribute of a function": (
        lambda net: getattr(counts, "later", 1.0), lambda: set_to(counts, "later", 2.0),
    ),
    "collector": (lambda net: float(gc.isenabled()), lambda: (gc.disable(), gc.enable)[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_is_watched(name: str) -> None:
    read, change = OTHERS[name]
    assert_watched(Net(read), read, change)


def test_a_function_that_is_registered_later_is_seen() -> None:
    @functools.singledispatch
    def by_kind(_: Any) -> float:
        return 1.0

    seen = Watch(Net(lambda net: by_kind(3)), mse_loss)
    assert by_kind(3) == 1.0 and seen.now() == 0
    by_kind.register(int)(lambda _: 2.0)
    assert seen.now() != 0


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 4, 3, generator=drawn, dtype=torch.float64)
    return x, y


def batches() -> Any:
    """The loop changes what the model reads."""
    for step in range(3):
        KEPT.factor = 1.0 + step
        yield batch(step)
    KEPT.factor = 1.0


def test_training_follows_what_a_decorated_function_reads() -> None:
    run, sgd = DECORATORS["no_grad"](read_object), functools.partial(torch.optim.SGD, lr=0.1)
    plain, trained = Net(lambda net: run()), Net(lambda net: run())
    loss = lambda x, y: mse_loss(plain(x), y)  # noqa: E731
    expected = plain_losses(sgd(plain.parameters()), batches(), loss)
    trainer = Trainer(trained, mse_loss, example=batch(0), optimizer=sgd)
    found = [trainer.step(*one).loss for one in batches()]
    trainer.close()
    assert found == pytest.approx(expected, rel=1e-12)
