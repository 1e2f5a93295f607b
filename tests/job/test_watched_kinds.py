"""Everything that a forward computes with is seen when it changes, wherever it is kept."""

import array
import contextvars
import copy
import ctypes
import datetime
import decimal
import importlib.util
import multiprocessing
import os
import sys
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import levels_of
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

import piper
from piper import Trainer, where
from piper.capture.outside.environment import Outside
from piper.capture.python_state.watch import Watch
from piper.errors import CaptureError

Undo = Callable[[], Any]


class Net(nn.Module):
    def __init__(self, k: Any = None) -> None:
        super().__init__()
        self.a, self.k = nn.Linear(6, 6), k

    def scale(self, one: float = 1.0, *, two: float = 1.0) -> float:
        return one * two

    @property
    def shift(self) -> float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) * self.scale() + self.shift + (0 if self.k is None else 1)


def put(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; what is returned sets it back."""
    special = name in ("__class__", "__code__", "__defaults__", "__kwdefaults__")
    own = special or name in vars(owner)
    before = getattr(owner, name) if special else vars(owner).get(name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if own else delattr(owner, name)


class Other(Net):
    pass


def shouted(self: Net, x: Tensor) -> Tensor:
    return self.a(x)


linear = nn.functional.linear
CODE = {  # how code is replaced
    "forward of a class": lambda net: put(Net, "forward", shouted),
    "forward of an object": lambda net: put(net, "forward", types.MethodType(shouted, net)),
    "__call__": lambda net: put(Net, "__call__", shouted),
    "method": lambda net: put(Net, "scale", lambda self: 2.0),
    "code": lambda net: put(Net.scale, "__code__", Net.shift.fget.__code__),
    "property": lambda net: put(Net, "shift", property(lambda self: 1.0)),
    "class": lambda net: put(net, "__class__", Other),
    "defaults": lambda net: put(Net.scale, "__defaults__", (2.0,)),
    "kwdefaults": lambda net: put(Net.scale, "__kwdefaults__", {"two": 2.0}),
    "kwdefault": lambda net: put_item(Net.scale.__kwdefaults__, "two", 2.0),
    "forward of torch": lambda net: put(nn.Linear, "forward", shouted),
    "torch function": lambda net: put(torch, "tanh", torch.sin),
    "function of modules": lambda net: put(nn.functional, "linear", nn.functional.bilinear),
    "without gradients": lambda net: put(nn.functional, "linear", torch.no_grad()(linear)),
    "compiled": lambda net: put(nn.functional, "linear", torch.compile(linear, backend="eager")),
    "tensor method": lambda net: put(torch.Tensor, "__mul__", torch.Tensor.__add__),
    "hook of the model": lambda net: net.register_forward_hook(lambda *_: None).remove,
    "hook before the model": lambda net: net.register_forward_pre_hook(lambda *_: None).remove,
    "hook of all modules": lambda net: register_module_forward_hook(lambda *_: None).remove,
    "hook before all modules": lambda net: register_module_forward_pre_hook(lambda *_: None).remove,
}


def put_item(holder: Any, key: Any, value: Any) -> Undo:
    before = holder[key]
    holder[key] = value
    return lambda: holder.__setitem__(key, before)


@pytest.mark.parametrize("name", CODE)
def test_replaced_code_is_seen(name: str) -> None:
    net = Net()
    seen = Watch(net, None)

    undo = CODE[name](net)
    state = seen.now()
    undo()

    assert state != 0
    assert seen.now() == 0


def test_what_torch_compile_replaces_in_torch_does_not_count(monkeypatch) -> None:
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, vars(nn.Module)[name])  # put back afterwards
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    before, seen = nn.Module.__init__, Watch(Net(), None)

    torch.compile(torch.sin, backend="eager")(torch.zeros(2))
    monkeypatch.setattr(nn.functional, "linear", torch.compiler.disable(linear))

    assert nn.Module.__init__ is not before
    assert seen.now() == 0


def through_numpy(value: Tensor) -> None:
    value.numpy()[...] += 1


def through_data(value: Tensor) -> None:
    value.data.add_(1)


def with_new_data(value: Tensor) -> None:
    value.data = value.data + 1


def one_element(value: Tensor) -> None:
    value.numpy()[(-1,) * value.ndim] += 1


TENSORS = {
    "small": lambda: torch.zeros(3),
    "no dimensions": lambda: torch.tensor(1.0),
    "whole numbers": lambda: torch.arange(7),
    "transposed": lambda: torch.zeros(5, 3).t(),
    "part of a larger one": lambda: torch.zeros(2**20)[4:9],
    "of numpy": lambda: torch.from_numpy(np.zeros(3)),
    "a quarter MiB": lambda: torch.zeros(2**16),
}


@pytest.mark.parametrize(
    ("name", "write"),
    levels_of(TENSORS, [through_numpy, through_data, with_new_data, one_element]),
)
def test_writes_that_have_no_version_are_seen(name: str, write: Callable[[Tensor], None]) -> None:
    value = TENSORS[name]()
    net = Net({"table": [value]})
    loss = Net(value)
    seen = Watch(net, None), Watch(Net(), loss)

    write(value)

    assert all(one.now() != 0 for one in seen)


def test_a_write_to_a_buffer_of_the_loss_is_seen() -> None:
    loss = Net()
    del loss.k
    loss.register_buffer("k", torch.ones(3))
    seen = Watch(Net(), loss)

    through_numpy(loss.k)

    assert seen.now() != 0


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)
VALUES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "array": (array.array("d", [1.0]), lambda k: k.__setitem__(0, 2.0)),
    "ctypes": (ctypes.c_double(1.0), lambda k: setattr(k, "value", 2.0)),
    "shared value": (multiprocessing.Value("d", 1.0), lambda k: setattr(k, "value", 2.0)),
    "bytearray": (bytearray(3), lambda k: k.__setitem__(0, 1)),
    "memoryview": (memoryview(bytearray(3)), lambda k: k.__setitem__(0, 1)),
    "context variable": (VARIABLE, lambda k: k.set(2.0)),
    "long list": ([1.0] * 1000, lambda k: k.__setitem__(700, 5.0)),
    "long list, another type": ([1.0] * 1000, lambda k: k.__setitem__(700, 1)),
    "long deque": (deque([1] * 1000), lambda k: k.rotate() or k.append(2)),
    "long list of pairs": ([(1, 2)] * 1000, lambda k: k.__setitem__(700, (1, 3))),
    "long dict": ({str(n): n for n in range(1000)}, lambda k: k.update({"700": 1})),
    "list of long lists": ([[1] * 1000], lambda k: k[0].append(1)),
    "order of a dict": ({"a": 1, "b": 2}, lambda k: k.update(a=k.pop("a"))),
    "order of a long dict": ({n: n for n in range(99)}, lambda k: k.update({0: k.pop(0)})),
    "ordered dict": (OrderedDict(a=1, b=2), lambda k: k.move_to_end("a")),
    "distribution": (
        torch.distributions.Normal(torch.zeros(1), torch.ones(1)),
        lambda k: setattr(k, "loc", torch.ones(1)),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_a_value_holds_is_seen(name: str) -> None:
    value, change = VALUES[name]
    seen = Watch(Net(value), None)

    assert seen.now() == 0
    change(value)

    assert seen.now() != 0


OTHERS: list[tuple[Any, Any]] = [
    (decimal.Decimal("1.5"), decimal.Decimal("2.5")),
    (datetime.timedelta(1), datetime.timedelta(2)),
    (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)),
    (torch.Generator(), torch.Generator()),
    (np.random.PCG64(1), np.random.PCG64(2)),
    (torch.relu, torch.tanh),
    (slice(1), slice(2)),
    (complex(1), complex(2)),
]


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_another_object_is_seen(one: Any, other: Any) -> None:
    net = Net(one)
    seen = Watch(net, None)

    net.k = other
    state = seen.now()
    net.k = one

    assert state != 0
    assert seen.now() == 0


class OwnDropout(nn.Dropout):
    pass


class OwnNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OwnItems(UserDict[str, float]):
    pass


class Kind(Enum):
    ONE = 1.0
    TWO = 2.0


INHERITED: dict[str, tuple[Any, Callable[[Net], Any]]] = {
    "own dropout": (OwnDropout(0.1), lambda net: put(net.k, "p", 0.5)),
    "own norm": (OwnNorm(6), lambda net: put(net.k, "eps", 0.5)),
    "dropout": (nn.Dropout(0.1), lambda net: put(net.k, "p", 0.5)),
    "own items": (OwnItems(a=1.0), lambda net: net.k.update(a=2.0)),
    "items": (UserDict(a=1.0), lambda net: net.k.update(a=2.0)),
    "a kind": (Kind.ONE, lambda net: put(net, "k", Kind.TWO)),
    "an array of objects": (np.array([[1.0], None], dtype=object), lambda net: net.k[0].append(1)),
}


@pytest.mark.parametrize("name", INHERITED)
def test_what_code_of_torch_and_python_reads_of_own_objects_is_seen(name: str) -> None:
    value, change = INHERITED[name]
    net = Net(value)
    seen = Watch(net, None)

    change(net)

    assert seen.now() != 0


def test_what_own_objects_note_for_others_does_not_count() -> None:
    net = Net(OwnDropout(0.1))
    seen = Watch(net, None)

    net.k.last_seen, net.k.history = 3, [1]

    assert seen.now() == 0


def test_a_new_object_that_is_equal_is_the_same_state() -> None:
    net = Net([decimal.Decimal("1.5"), {"a": [1.0] * 100}])
    seen = Watch(net, None)

    net.k = copy.deepcopy(net.k)

    assert seen.now() == 0


@pytest.fixture
def settings() -> Iterator[types.ModuleType]:
    """A package with a module, as a program has them."""
    package, inner = types.ModuleType("own_settings"), types.ModuleType("own_settings.inner")
    package.inner, package.factor, inner.factor = inner, 1.0, 1.0  # type: ignore[attr-defined]
    sys.modules |= {"own_settings": package, "own_settings.inner": inner}
    yield package
    del sys.modules["own_settings"], sys.modules["own_settings.inner"]


def imports(_: Any) -> Any:
    import own_settings  # type: ignore[import-not-found]

    return own_settings.factor * own_settings.inner.factor


def imports_a_name(_: Any) -> Any:
    from own_settings.inner import factor  # type: ignore[import-not-found]

    return factor


def imports_inner(_: Any) -> Any:
    import own_settings.inner as short

    return short.factor


def looks_up(_: Any) -> Any:
    return sys.modules["own_settings.inner"].factor  # type: ignore[attr-defined]


def closure(package: Any) -> Any:
    return lambda _: package.inner.factor


@pytest.mark.parametrize(
    "make", [lambda _, f=f: f for f in (imports, imports_a_name, imports_inner, looks_up)]
    + [closure],
)  # fmt: skip
def test_attributes_of_modules_are_seen(
    make: Callable[[Any], Any], settings: types.ModuleType
) -> None:
    net = Net()
    net.scale = make(settings)  # type: ignore[method-assign]
    seen = Watch(net, None)

    settings.inner.factor = 2.0

    assert seen.now() != 0
    settings.inner.factor = 1.0
    assert seen.now() == 0


HOOKS = [register_module_full_backward_hook, register_module_full_backward_pre_hook]
X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.ones(4, 6)


class Reader(nn.Module):
    """Reads from outside of the program."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.a, self.folder = nn.Linear(6, 6), folder

    def forward(self, x: Tensor) -> Tensor:
        scale = float(os.environ.get("OWN_SCALE", "1")) * float(os.getenv("OWN_OTHER") or 1)
        with open(self.folder / "a.txt") as file:
            scale *= float(file.read())
        scale *= float((self.folder / "b.txt").read_text())
        if os.path.exists(self.folder / "flag"):
            scale *= 3
        if importlib.util.find_spec("a_module_that_nobody_has"):  # looks through folders
            scale *= 5
        return self.a(x) * scale * float(np.load(self.folder / "t.npy").sum())


def change_outside(folder: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    match step:
        case 0:
            (folder / "a.txt").write_text("1.0")
            (folder / "b.txt").write_text("2.0")
            np.save(folder / "t.npy", np.ones(6, dtype=np.float32))
        case 1:
            monkeypatch.setenv("OWN_SCALE", "0.5")
        case 2:
            monkeypatch.setenv("OWN_OTHER", "3")
        case 3:
            (folder / "a.txt").write_text("1.25")
        case 4:
            (folder / "b.txt").write_text("0.5")
        case 5:
            (folder / "flag").touch()
        case 6:
            np.save(folder / "t.npy", np.arange(6, dtype=np.float32))
        case 7:
            monkeypatch.delenv("OWN_SCALE")
            (folder / "flag").unlink()


def test_a_step_reads_variables_and_files_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_outside(tmp_path, 0, monkeypatch)
    torch.manual_seed(0)
    model = Reader(tmp_path)
    eager, strategy = copy.deepcopy(model), [piper.Place(where(), [0])]
    sgd = torch.optim.SGD(eager.parameters(), lr=0.01)
    trainer = Trainer(
        model, nn.functional.mse_loss, strategy, example=(X, Y), device="cpu",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
    )  # fmt: skip

    for step in range(9):
        change_outside(tmp_path, step, monkeypatch)
        loss = nn.functional.mse_loss(eager(X), Y)
        assert trainer.step(X, Y).loss == pytest.approx(loss.item(), rel=1e-5), step
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    trainer.close()
    outside = trainer._job.python_state.watch.outside  # type: ignore[union-attr]
    assert {*outside.variables} == {"OWN_SCALE", "OWN_OTHER"}  # none of torch's
    assert {Path(one).name for one in outside.files} == {"a.txt", "b.txt", "flag", "t.npy"}


def test_nothing_stays_replaced_after_an_error() -> None:
    before = open, os.stat, os.open, type(os.environ).__getitem__
    with pytest.raises(ValueError, match="mine"), Outside().recording():
        assert open is not before[0]
        raise ValueError("mine")

    assert (open, os.stat, os.open, type(os.environ).__getitem__) == before


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_on_the_gradients_of_all_modules_are_refused(register: Any) -> None:
    strategy = [piper.Place(where(), [0])]
    given = Net(), nn.functional.mse_loss, strategy
    trainer = Trainer(*given, example=(X, Y), device="cpu")
    trainer.step(X, Y)

    handle = register(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="hook on gradients"):
            trainer.step(X, Y)
        with pytest.raises(CaptureError, match="hook on gradients"):
            Trainer(*given, example=(X, Y), device="cpu")
    finally:
        handle.remove()
    trainer.step(X, Y)
    trainer.close()
