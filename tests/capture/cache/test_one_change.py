"""One thing is changed at a time. If it changes what is computed, the cache must not know it.

Each change is compared with a capture without a cache, so that a wrong hit cannot hide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture.cache.test_hits import texts
from draws import every
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture import Captured, Precision, annotate, capture
from piper.capture.cache import surroundings

HOW_MUCH = 3.0


def deep(x: Tensor) -> Tensor:
    return x * 2.0


def outer(x: Tensor) -> Tensor:
    return deep(x) + HOW_MUCH


class Net(nn.Module):
    slope = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=0.25, causal=True, extra=[1.0, 2.0])
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.drop = nn.Dropout(0.1)
        self.table = torch.ones(4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            y = outer(self.linear(x)) * self.config.scale + self.table + self.shift
            y = scaled_dot_product_attention(y, y, y, is_causal=self.config.causal)
            y = nn.functional.leaky_relu(self.norm(y), self.slope) * self.config.extra[1]
            return self.drop(y) + torch.linspace(0, 1, 4)


def mean(output: Tensor, labels: Tensor) -> Tensor:
    return ((output - labels) ** 2).mean()


@dataclass
class Given:
    """Everything that a capture gets."""

    model: Any
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: tuple[Tensor, ...]
    precision: Precision | None = None

    def captured(self) -> Captured:
        return capture(self.model, self.loss_fn, self.batch, precision=self.precision)


def made() -> Given:
    torch.manual_seed(0)
    return Given(Net(), mean, (torch.randn(2, 3, 4), torch.randn(2, 3, 4)))


Change = Callable[[Given, pytest.MonkeyPatch], Any]


def other_deep(x: Tensor) -> Tensor:
    return x * 2.5


def put(patch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    patch.setitem(outer.__globals__, name, value)


def other_loss(output: Tensor, labels: Tensor) -> Tensor:
    return ((output - labels) ** 4).mean()


CHANGES: dict[str, Change] = {
    "a constant of a function two calls deep": lambda _, patch: put(patch, "deep", other_deep),
    "a global": lambda _, patch: put(patch, "HOW_MUCH", 3.5),
    "a class attribute": lambda _, patch: patch.setattr(Net, "slope", 0.25),
    "a field of the configuration": lambda given, _: setattr(given.model.config, "scale", 0.3),
    "a flag of the configuration": lambda given, _: setattr(given.model.config, "causal", False),
    "an item of a list": lambda given, _: given.model.config.extra.__setitem__(1, 2.5),
    "one bit of a constant tensor": lambda given, _: given.model.table.__setitem__(2, 1.0000001),
    "the eps of a norm": lambda given, _: setattr(given.model.norm, "eps", 1e-3),
    "the rate of dropout": lambda given, _: setattr(given.model.drop, "p", 0.2),
    "evaluation of dropout": lambda given, _: given.model.drop.eval(),
    "a frozen parameter": lambda given, _: given.model.linear.weight.requires_grad_(False),
    "a missing bias": lambda given, _: setattr(given.model.linear, "bias", None),
    "the loss": lambda given, _: setattr(given, "loss_fn", other_loss),
    "the size of the batch": lambda given, _: setattr(
        given, "batch", tuple(torch.cat([one, one]) for one in given.batch)
    ),
    "the type of the model": lambda given, _: (
        given.model.double(),
        setattr(given.model, "table", given.model.table.double()),
        setattr(given, "batch", tuple(one.double() for one in given.batch)),
    ),
    "the precision": lambda given, _: (
        setattr(given, "precision", Precision(compute="bf16")),
        setattr(given, "batch", tuple(one.bfloat16() for one in given.batch)),
    ),
    "a function of torch": lambda _, patch: patch.setattr(
        nn.functional, "leaky_relu", lambda x, slope: nn.functional.elu(x, slope)
    ),
    "a tensor in place of a buffer": lambda given, _: (
        given.model.__delattr__("shift"), setattr(given.model, "shift", torch.ones(4)),
    ),
}  # fmt: skip


def compared(given: Given, patch: pytest.MonkeyPatch) -> Captured:
    """With the cache, and equal to a capture without it."""
    found = given.captured()
    with patch.context() as off:
        off.setenv("PIPER_CACHE", "off")
        plain = given.captured()
    assert plain.was_read == 0
    assert texts(found) == texts(plain)
    assert found.model == plain.model
    return found


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that knows the model as it is."""
    folder = tmp_path_factory.mktemp("cache") / "regions"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPER_CACHE", str(folder))
        made().captured()
    yield folder


@pytest.fixture
def patch(warm: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PIPER_CACHE", str(warm))
    return monkeypatch


def test_without_a_change_it_is_a_hit(patch: pytest.MonkeyPatch) -> None:
    assert compared(made(), patch).was_read == 1


@pytest.mark.parametrize("name", every(18, CHANGES))
def test_what_changes_the_model_is_a_miss(name: str, patch: pytest.MonkeyPatch) -> None:
    given = made()
    CHANGES[name](given, patch)

    assert compared(given, patch).was_read == 0


def test_a_value_of_a_parameter_or_a_buffer_is_no_change(patch: pytest.MonkeyPatch) -> None:
    given = made()
    with torch.no_grad():
        given.model.linear.weight.add_(1.0)
        given.model.shift.add_(1.0)

    assert compared(given, patch).was_read == 1


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def settings(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: default_dtype(torch.float64),
    "attention without flash": lambda: torch.nn.attention.sdpa_kernel(
        [torch.nn.attention.SDPBackend.MATH]
    ),
    "tf32": lambda: settings(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32 of convolutions": lambda: settings(torch.backends.cudnn, "allow_tf32", False),
    "no cudnn": lambda: settings(torch.backends.cudnn, "enabled", False),
    "deterministic algorithms": deterministic,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "hooks on what autograd keeps": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x
    ),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
}


def key_of() -> str | None:
    return surroundings.surroundings("cpu")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_is_another_key(name: str) -> None:
    before = key_of()
    assert before is not None

    with SETTINGS[name]():
        assert key_of() != before

    assert key_of() == before


def test_variables_of_torch_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of()

    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")

    assert key_of() != before


def test_another_source_of_piper_is_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of()
    (tmp_path / "joint.py").write_text("x = 1")
    monkeypatch.setattr(surroundings, "_SOURCE", tmp_path)
    surroundings._versions.cache_clear()
    monkeypatch.setattr(surroundings, "_versions", copy.copy(surroundings._versions))

    try:
        other = key_of()
        surroundings._versions.cache_clear()
        (tmp_path / "joint.py").write_text("x = 2")
        assert len({before, other, key_of()}) == 3
    finally:
        surroundings._versions.cache_clear()


def test_under_a_mode_of_the_user_nothing_is_cached() -> None:
    with Passing():
        assert key_of() is None
    with torch.device("cpu"):
        assert key_of() is None


def test_with_a_kernel_of_the_user_nothing_is_cached() -> None:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("special_bessel_j1", lambda x: x, "CPU")
        assert key_of() is None
    finally:
        library._destroy()
    assert key_of() is not None


@torch.library.custom_op("piper_cache_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)


def test_an_operator_of_the_user_is_not_cached(patch: pytest.MonkeyPatch) -> None:
    given = made()
    put(patch, "deep", lambda x: twice(x))
    given.captured()

    assert compared(given, patch).was_read == 0
