"""What a forward reads of Python's own objects, of settings, and of attributes of tensors."""

from __future__ import annotations

import decimal
import io
import logging
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from watched import Undo, assert_watched, undone

from piper import Trainer
from piper.capture import capture
from piper.capture.python_state.watch import Watch
from piper.errors import CaptureError


class Meta(type):
    factor = 1.0


class OfMeta(metaclass=Meta):
    pass


class Referred:
    def __init__(self) -> None:
        self.factor = 1.0


TEXT, DATA, OWN_THREAD = io.StringIO("1"), io.BytesIO(b"1"), threading.local()
OWN_THREAD.factor = 1.0
TEXT.seek(1), DATA.seek(1)
READ_ONLY = types.MappingProxyType(BEHIND := {"factor": 1.0})
WEAK = weakref.ref(REFERRED := Referred())
TABLE = torch.ones(3)
EXECUTED: dict[str, Any] = {}
exec("FACTOR = 1.0\ndef of_text(net): return FACTOR", EXECUTED)  # noqa: S102


def set_to(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def set_item(owner: Any, key: Any, value: Any) -> Undo:
    before = owner[key]
    owner[key] = value
    return lambda: owner.__setitem__(key, before)


def written(file: Any, before: Any, now: Any) -> Undo:
    def write(value: Any) -> None:
        file.seek(0)
        file.write(value)

    write(now)
    return lambda: write(before)


def called(put: Callable[[Any], Any], before: Any, now: Any) -> Undo:
    put(now)
    return lambda: put(before)


def default_type() -> Callable[[Any], float]:
    get = torch.get_default_dtype
    return lambda net: 2.0 if get() == torch.bfloat16 else 1.0


def level(name: str) -> Callable[[int], None]:
    return lambda now: logging.getLogger(name).setLevel(now)


def precision(now: int) -> None:
    decimal.getcontext().prec = now


strict = torch.use_deterministic_algorithms
products = torch.set_float32_matmul_precision
KINDS: dict[str, tuple[Callable[[Any], float], Callable[[Any], Undo]]] = {
    "text in memory": (lambda net: float(TEXT.getvalue()), lambda net: written(TEXT, "1", "2")),
    "bytes in memory": (lambda net: float(DATA.getvalue()), lambda net: written(DATA, b"1", b"2")),
    "thread": (lambda net: OWN_THREAD.factor, lambda net: set_to(OWN_THREAD, "factor", 2.0)),
    "read-only dict": (
        lambda net: READ_ONLY["factor"], lambda net: set_item(BEHIND, "factor", 2.0),
    ),
    "weak reference": (lambda net: WEAK().factor, lambda net: set_to(REFERRED, "factor", 2.0)),
    "metaclass": (lambda net: OfMeta.factor, lambda net: set_to(Meta, "factor", 2.0)),
    "executed text": (EXECUTED["of_text"], lambda net: set_item(EXECUTED, "FACTOR", 2.0)),
    "decimals": (
        lambda net: float(decimal.Decimal(1) / decimal.Decimal(3)),
        lambda net: called(precision, 28, 3),
    ),
    "random state": (
        lambda net: float(random.getstate()[1][1]),
        lambda net: partial(random.setstate, (random.getstate(), random.seed(4))[0]),
    ),
    "getter in a closure": (
        default_type(), lambda net: called(torch.set_default_dtype, torch.float32, torch.bfloat16),
    ),
    "getter as an attribute": (
        lambda net: 2.0 if net.ask() == "high" else 1.0,
        lambda net: called(products, "highest", "high"),
    ),
    "getter in a list": (lambda net: float(net.asks[0]()), lambda net: called(strict, False, True)),
    "level of a logger by name": (
        lambda net: 2.0 if logging.getLogger("elsewhere").isEnabledFor(10) else 1.0,
        lambda net: called(level("elsewhere"), 0, 10),
    ),
    "level above a logger": (
        lambda net: float(logging.getLogger("elsewhere.below").getEffectiveLevel()),
        lambda net: called(level("elsewhere"), 0, 10),
    ),
    "all loggers": (
        lambda net: 2.0 if logging.getLogger("elsewhere").isEnabledFor(50) else 1.0,
        lambda net: called(logging.disable, 0, 50),
    ),
    "first logger": (
        lambda net: float(logging.root.level),
        lambda net: called(logging.root.setLevel, logging.root.level, 17),
    ),
    "arguments of the program": (
        lambda net: float(len(sys.argv)), lambda net: set_to(sys, "argv", [*sys.argv, "more"]),
    ),
    "flag of Python": (
        lambda net: float(sys.dont_write_bytecode),
        lambda net: set_to(sys, "dont_write_bytecode", not sys.dont_write_bytecode),
    ),
    "folder": (lambda net: float(len(os.getcwd())), lambda net: called(os.chdir, os.getcwd(), "/")),
    "errors of numpy": (
        lambda net: 2.0 if np.geterr()["over"] == "raise" else 1.0,
        lambda net: called(lambda how: np.seterr(over=how), np.geterr()["over"], "raise"),
    ),
    "attribute of a parameter": (
        lambda net: net.a.weight.factor, lambda net: set_to(net.a.weight, "factor", 2.0),
    ),
    "attribute of a buffer": (
        lambda net: net.kept.factor, lambda net: set_to(net.kept, "factor", 2.0),
    ),
    "attribute of a tensor": (
        lambda net: net.plain.factor, lambda net: set_to(net.plain, "factor", 2.0),
    ),
    "attribute of a global": (lambda net: TABLE.factor, lambda net: set_to(TABLE, "factor", 2.0)),
    "list of a parameter": (
        lambda net: net.a.weight.factors[0], lambda net: set_item(net.a.weight.factors, 0, 2.0),
    ),
    "needs a gradient": (
        lambda net: 1.0 + TABLE.requires_grad,
        lambda net: called(TABLE.requires_grad_, False, True),
    ),
    "gradient": (
        lambda net: 1.0 if TABLE.grad is None else float(TABLE.grad.sum()),
        lambda net: set_to(TABLE, "grad", torch.full((3,), 2.0)),
    ),
    "new attribute": (
        lambda net: getattr(net.a.weight, "late", 1.0), lambda net: added(net.a.weight, "late"),
    ),
}  # fmt: skip


def added(owner: Any, name: str) -> Undo:
    setattr(owner, name, 2.0)
    return lambda: delattr(owner, name)


class Net(nn.Module):
    kept: Tensor

    def __init__(self, how: Callable[[Any], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.how = nn.Linear(3, 3, dtype=torch.float64), how
        self.register_buffer("kept", torch.ones(3, dtype=torch.float64))
        self.plain = torch.ones(3)
        self.ask, self.asks = (
            torch.get_float32_matmul_precision,
            [torch.are_deterministic_algorithms_enabled],
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.how(self)


def made(factor: Callable[[Any], float]) -> Any:
    net = Net(factor)
    for one in (net.a.weight, net.kept, net.plain, TABLE):
        one.factor, one.factors = 1.0, [1.0]  # type: ignore[attr-defined]
    return net


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_is_watched(name: str) -> None:
    read, change = KINDS[name]
    net = made(read)
    assert_watched(net, read, partial(change, net))


def test_each_gradient_has_its_own_state() -> None:
    net = made(KINDS["gradient"][0])
    seen, states = Watch(net, mse_loss), []
    for value in (1.0, 2.0, 3.0):
        TABLE.grad = torch.full((3,), value)
        states.append(seen.now())
    TABLE.grad = None

    assert len({0, *states}) == 4


def test_what_nobody_reads_is_not() -> None:
    net = made(lambda net: 1.0)
    seen = Watch(net, mse_loss)

    for name in KINDS.keys() - {"getter as an attribute", "getter in a list"}:  # net holds these
        with undone(KINDS[name][1](net)):
            assert seen.now() == 0, name


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 4, 3, generator=drawn, dtype=torch.float64)
    return x, y


def batches(net: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The loop sets attributes of parameters and buffers before each step."""
    for step in range(3):
        net.a.weight.factor, net.kept.factor = 1.0 + step, 2.0 - step
        yield batch(step)


def test_training_follows_attributes_of_parameters_and_buffers() -> None:
    of = lambda net: net.a.weight.factor * net.kept.factor  # noqa: E731
    plain, trained, sgd = made(of), made(of), partial(torch.optim.SGD, lr=0.1)
    loss = lambda x, y: mse_loss(plain(x), y)  # noqa: E731
    expected = plain_losses(sgd(plain.parameters()), batches(plain), loss)
    trainer = Trainer(trained, mse_loss, example=batch(0), optimizer=sgd)

    assert [trainer.step(*one).loss for one in batches(trained)] == pytest.approx(expected, 1e-12)
    for key, one in trainer.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[key], one, rtol=0, atol=1e-12)
    trainer.close()


def counts(tensor: Callable[[Any], Any]) -> Callable[[Any], float]:
    def count(net: Any) -> float:
        tensor(net).factor += 1.0
        return float(tensor(net).factor)

    return count


def appends(net: Any) -> float:
    net.a.weight.factors.append(1.0)
    return float(len(net.a.weight.factors))


CHANGES = {
    "parameter": counts(lambda net: net.a.weight),
    "buffer": counts(lambda net: net.kept),
    "tensor": counts(lambda net: net.plain),
    "global": counts(lambda net: TABLE),
    "list": appends,
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_that_a_forward_changes_is_refused(name: str) -> None:
    net = made(CHANGES[name])
    with pytest.raises(CaptureError, match=r"test_watched_elsewhere.py:\d+: the forward changes"):
        capture(net, mse_loss, batch(0))
    assert net.a.weight.factors == [1.0] and TABLE.factor == 1.0
