"""What a forward reads by ways that nobody watches: it runs again, and must call the same."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sqlite3
import sys
import weakref
from abc import ABC
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from piper import Place, Split, Trainer, where
from piper.errors import InputError
from piper.job.programs import forward_check

SGD = partial(torch.optim.SGD, lr=0.1)
PARTS = [Place(where(), [0]), Split("MB", 2)]
Scale = Callable[["Net"], Any]


class Net(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4).double(), scale

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.scale(self)
        return result


class Fields(ctypes.Structure):
    _fields_ = [("factor", ctypes.c_double)]


class Hidden:
    """A descriptor that keeps its value under a name which it computes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name[::-1]

    def __get__(self, net: Any, owner: type) -> Any:
        return vars(net).get(self.name, 1.0)

    def __set__(self, net: Any, value: float) -> None:
        vars(net)[self.name] = value


class Described(Net):
    factor = Hidden()


FIELDS = Fields(1.0)
LINK = Path("factor")  # in the folder of the test


class Marked(ABC):  # noqa: B024
    """What a loop may register."""


class Plain:
    pass


ROWS = sqlite3.connect(":memory:", check_same_thread=False)
ROWS.execute("create table settings (factor real)")


def insert(factor: float) -> None:
    ROWS.execute("delete from settings")
    ROWS.execute("insert into settings values (?)", (factor,))


def register(factor: float) -> None:
    if factor > 1.0:
        Marked.register(Plain)


def documented() -> None:
    """x"""


def annotated(net: Net) -> float:
    return float(type(net).__annotations__.get("factor", 1.0))


def imported(net: Net) -> float:
    import piper_test_settings  # type: ignore[import-not-found]

    return float(piper_test_settings.factor)


def settings(factor: float) -> None:
    module = ModuleType("piper_test_settings")
    module.factor = factor  # type: ignore[attr-defined]
    sys.modules["piper_test_settings"] = module


def link(factor: float) -> None:
    LINK.unlink(missing_ok=True)
    LINK.symlink_to(str(factor))


def masked(net: Net) -> float:
    os.umask(before := os.umask(0))
    return 1.0 + before


def set_umask(factor: float) -> None:
    os.umask(int(factor))


def document(factor: float) -> None:
    documented.__doc__ = "x" * int(factor)


def annotate(factor: float) -> None:
    Net.__annotations__ = {"factor": factor}


WAYS: dict[str, tuple[Scale, Callable[[float], Any]]] = {
    "a field of C": (lambda net: FIELDS.factor, lambda f: setattr(FIELDS, "factor", f)),
    "another program": (lambda net: float(os.popen("echo ${FACTOR:-1}").read()),
                        lambda f: os.putenv("FACTOR", str(f))),
    "a link": (lambda net: float(os.readlink(LINK)), link),
    "a mask of the process": (masked, set_umask),
    "a documentation": (lambda net: len(documented.__doc__ or ""), document),
    "annotations": (annotated, annotate),
    "a module of that name": (imported, settings),
    "a row": (lambda net: ROWS.execute("select factor from settings").fetchone()[0], insert),
    "a registered class": (lambda net: 3.0 if isinstance(Plain(), Marked) else 1.0, register),
}  # fmt: skip


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0)
    for _, change in WAYS.values():
        change(1.0)
    yield
    os.umask(mask)
    sys.modules.pop("piper_test_settings", None)
    del Net.__annotations__


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    given = torch.randn(4, 2, 4, 4, generator=draw).double()
    return [(x, y) for x, y in given]


def trainer_of(net: Net) -> Trainer:
    return Trainer(net, F.mse_loss, PARTS, example=batches()[0], optimizer=SGD, device="cpu")


@one_of(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_changes_in_the_first_steps_is_refused(way: str) -> None:
    scale, change = WAYS[way]
    with trainer_of(Net(scale)) as trainer:
        trainer.step(*batches()[0])
        change(3.0)

        with pytest.raises(InputError) as refused:
            trainer.step(*batches()[1])

    assert "which Piper does not watch" in str(refused.value)
    assert "test_forward_check.py:" in str(refused.value)


def test_a_descriptor_with_names_of_its_own() -> None:
    net = Described(lambda net: net.factor)  # type: ignore[attr-defined]
    with trainer_of(net) as trainer:
        trainer.step(*batches()[0])
        net.factor = 3.0

        with pytest.raises(InputError, match="now calls mul with 3 in place of 1 at"):
            trainer.step(*batches()[1])


@pytest.mark.parametrize("use", [lambda one: one.state_dict(), lambda one: one.close()])
def test_what_changes_later_is_refused_before_it_is_used(use: Callable[[Trainer], Any]) -> None:
    trainer = trainer_of(Net(WAYS["a link"][0]))
    for batch in batches():
        trainer.step(*batch)
    link(3.0)
    trainer._programs.check.due = float("inf")
    trainer.step(*batches()[0])

    with pytest.raises(InputError, match="steps since the last check may have trained as before"):
        use(trainer)
    trainer.close()


def test_later_checks_take_a_hundredth_of_the_time() -> None:
    now = [0.0]
    check = forward_check.ForwardCheck(clock=lambda: now[0])
    seen = []
    with trainer_of(Net(lambda net: 2.0)) as trainer:
        job, known = trainer._job, trainer._programs.check.known
        check.known, kind = known, next(iter(known))
        check.sizes = trainer._programs.check.sizes
        for step in range(400):
            before = check.checks
            check.step(job, kind)
            if check.checks > before:
                seen.append(step)
                check.due = now[0] + forward_check.SHARE  # as if it had taken a second
            now[0] += 1.0

    assert seen == [0, 1, 101, 201, 301]


class Bag:
    def __init__(self, weight: float) -> None:
        self.weight = weight


class OfASet(Net):
    """Objects in the order of their addresses, which are others in each copy of the model."""

    def __init__(self) -> None:
        super().__init__(lambda net: 2.0)
        self.bags = {Bag(float(k)) for k in range(8)}

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        for bag in self.bags:
            found = found + bag.weight
        return found


def test_the_order_of_a_set_is_no_change() -> None:
    with trainer_of(OfASet()) as trainer:
        for _ in range(3):
            for batch in batches():
                trainer._programs.check.due = 0.0
                trainer.step(*batch)


class Other(Net):
    """Keeps what it calls, but for a random number and a time that nobody uses."""

    def forward(self, x: Tensor) -> Tensor:
        found = F.dropout(super().forward(x), 0.0)
        return found.masked_fill(x > 1e9, float("nan")) * torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad])
def test_what_stays_the_same_trains_as_plain(around: Callable[[], Any]) -> None:
    model = Other(lambda net: 2.0)
    expected = plain_losses(
        SGD(model.parameters()), batches(), lambda x, y: F.mse_loss(model(x), y)
    )

    with trainer_of(Other(lambda net: 2.0)) as trainer, around():
        found = [trainer.step(*batch).loss for batch in batches()]
        assert trainer._programs.check.checks == forward_check.ALWAYS
        trainer.state_dict()
        assert trainer._programs.check.checks == forward_check.ALWAYS + 1

    assert found == pytest.approx(expected, rel=1e-12)


def test_modes_that_count_see_steps_only() -> None:
    counted = []
    with trainer_of(Net(lambda net: 2.0)) as trainer:
        for batch in batches():
            with FlopCounterMode(display=False) as mode:
                trainer.step(*batch)
            counted.append(mode.get_total_flops())

    assert counted == 4 * counted[:1] and counted[0] > 0


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_that_replace_functions_see_no_check() -> None:
    with trainer_of(Net(lambda net: 2.0)) as trainer:
        check = trainer._programs.check
        with Seen() as mode:
            check.check(trainer._job, next(iter(check.known)))

    assert check.checks == 1 and mode.calls == 0


@pytest.mark.parametrize("change", [lambda net: net.float(), lambda net: net.to("meta")])
def test_the_model_may_be_converted_after_training(change: Callable[[Net], Any]) -> None:
    trainer = trainer_of(net := Net(lambda net: 2.0))
    losses = [trainer.step(*batch).loss for batch in batches()]

    change(net)

    assert trainer.state_dict() is not None and len(losses) == 4
    trainer.close()


class Kept:
    """Something that is referred to weakly."""


def test_weak_references_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    net = Net(lambda net: 1.0 if net.weak() is None else 2.0)  # type: ignore[operator]
    net.kept = Kept()  # type: ignore[assignment]
    net.weak = weakref.ref(net.kept)  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "piper"), trainer_of(net) as trainer:
        trainer.step(*batches()[0])
    gc.collect()

    assert "model.weak refers weakly to what the forward reads" in caplog.text
