"""`trainer.state_dict()` of models that rename, convert or add to what they save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import nn
from torch.nn import functional

import piper
from piper import strategies
from piper.errors import InputError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.b.weight = self.a.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.b(self.a(x).tanh())


class Renamed(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {f"m.{name}": one for name, one in super().state_dict(*args, **options).items()}


class Converted(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {name: one.float() for name, one in super().state_dict(*args, **options).items()}


class Fewer(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **options)
        return {name: one for name, one in found.items() if name.startswith("b")}


class Merged(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **options)
        return {**found, "ab": self.a.weight.detach() @ self.b.weight.detach()}


class Swapped(Net):
    """Under names that the model has, too."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **options)
        return {**found, "a.bias": found["b.bias"], "b.bias": found["a.bias"]}


class Extra(Net):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 2}


class Nested(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {"a": self.a.state_dict(), "rest": [self.b.bias.detach(), self.seen]}


class Numbers(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **options)
        return {**found, "norm": self.a.weight.norm().item()}


class Arrays(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **options)
        return {name: one.detach().numpy() for name, one in found.items()}


class Listed(Net):
    """Keeps its parameters outside of modules as well."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = list(self.parameters())

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {f"p{k}": one.data if k % 2 else one for k, one in enumerate(self.mine)}


class ExtraNorm(Net):
    def get_extra_state(self) -> dict[str, Any]:
        return {"norm": self.a.weight.detach().norm()}

    def set_extra_state(self, state: dict[str, Any]) -> None: ...


def with_hook(model: Net, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Net:
    model._register_state_dict_hook(lambda module, found, prefix, local: change(found))
    return model


def stripped(found: dict[str, Any]) -> None:
    for name in list(found):
        found[name.removeprefix("a.")] = found.pop(name)


KINDS = (
    Net, Renamed, Converted, Fewer, Merged, Swapped, Extra, Nested, Numbers, Arrays, Listed,
    ExtraNorm,
)  # fmt: skip
MODELS: dict[str, Callable[[], Net]] = {
    **{kind.__name__: kind for kind in KINDS},
    "hook strips": lambda: with_hook(Net(), stripped),
    "hook clones": lambda: with_hook(Net(), lambda found: {n: t.clone() for n, t in found.items()}),
    "hook scales": lambda: with_hook(Net(), lambda found: {n: 2 * t for n, t in found.items()}),
    "hook transposes": lambda: with_hook(
        Net(), lambda found: {n: t.t() for n, t in found.items() if t.dim()}
    ),
}
BATCHES = [
    tuple(torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * k + i))
          for i in range(2))
    for k in range(3)
]  # fmt: skip


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@one_of(2)
@pytest.mark.parametrize("name", every(2, MODELS))
def test_it_is_what_the_model_saves_after_plain_training(name: str) -> None:
    plain = MODELS[name]()
    optimizer = sgd(plain.parameters())
    for x, y in BATCHES:
        optimizer.zero_grad()
        functional.mse_loss(plain(x), y).backward()
        optimizer.step()

    trainer = trainer_of(MODELS[name]())
    with closing(trainer):
        for batch in BATCHES:
            trainer.step(*batch)
        found = trainer.state_dict()

    wanted = plain.state_dict()
    assert found is not None and found.keys() == wanted.keys()
    assert_same(found, wanted)


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict | list):
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            assert_same(found[key], wanted[key])
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


class Doubled(Net):
    def _load_from_state_dict(self, found: dict[str, Any], prefix: str, *rest: Any) -> None:
        found["a.bias"] = found["a.bias"] * 2
        super()._load_from_state_dict(found, prefix, *rest)


class DoubledAll(Net):
    def load_state_dict(self, found: Any, *args: Any, **options: Any) -> Any:
        return super().load_state_dict({n: t * 2 for n, t in found.items()}, *args, **options)


class Turned(Net):
    """A checkpoint of a library whose matrices are transposed."""

    def _load_from_state_dict(self, found: dict[str, Any], prefix: str, *rest: Any) -> None:
        found["a.weight"] = found["b.weight"] = found["a.weight"].t()
        super()._load_from_state_dict(found, prefix, *rest)


class Loading(Net):
    """Changes what it loads by a function."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def load_state_dict(self, found: Any, *args: Any, **options: Any) -> Any:
        found = {name: self.change(one) for name, one in found.items()}
        return super().load_state_dict(found, *args, **options)


def rows_swapped(one: torch.Tensor) -> torch.Tensor:
    return one.view(2, 2, *one.shape[1:]).transpose(0, 1).reshape(one.shape) if one.dim() else one


class Table(Net):
    """Made of weights again after each load, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", self.a.weight.detach().norm(), persistent=False)
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())

    @torch.no_grad()
    def refresh(self) -> None:
        self.scale.copy_(self.a.weight.norm())


class Teacher(Net):
    """Outside of the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(4, 4).double()]
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())

    def refresh(self) -> None:
        self.teacher[0].load_state_dict(self.a.state_dict())


class Number(Net):
    def __init__(self) -> None:
        super().__init__()
        self._gain = 1.0
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "_gain", 2.0))


class Counted(Net):
    """Changes nothing that it loads."""

    def _load_from_state_dict(self, found: dict[str, Any], prefix: str, *rest: Any) -> None:
        found.pop(f"{prefix}old", None)
        super()._load_from_state_dict(found, prefix, *rest)


def doubled(one: torch.Tensor) -> None:
    one.data.mul_(2)


def with_loading_hook(after: bool) -> Net:
    net = Net()
    if after:
        net.register_load_state_dict_post_hook(lambda module, _: doubled(module.a.bias))
    else:
        net._register_load_state_dict_pre_hook(
            lambda found, prefix, *_: found.update({f"{prefix}b.bias": found["b.bias"] * 2})
        )
    return net


LOADING: dict[str, Callable[[], Net]] = {
    **{kind.__name__: kind for kind in (Doubled, DoubledAll, Turned, Table, Teacher, Number)},
    "flips": lambda: Loading(lambda one: one.flip(0) if one.dim() else one),
    "sorts": lambda: Loading(lambda one: one.sort().values if one.dim() else one),
    "swaps rows": lambda: Loading(rows_swapped),
    "rounds": lambda: Loading(lambda one: one.half().double()),
    "clamps": lambda: Loading(lambda one: one.clamp(min=0.01)),
    "hook before": lambda: with_loading_hook(after=False),
    "hook after": lambda: with_loading_hook(after=True),
}


def trainer_of(model: Net) -> piper.Trainer:
    return piper.Trainer(
        model, functional.mse_loss, strategies.gpipe(pp=1, microbatches=1), example=BATCHES[0],
        optimizer=sgd, device="cpu",
    )  # fmt: skip


@one_of(2)
@pytest.mark.parametrize("name", every(2, LOADING))
def test_a_model_that_converts_what_it_loads(name: str, tmp_path: Path) -> None:
    model = LOADING[name]()
    before = {key: one.clone() for key, one in model.state_dict().items()}
    with closing(trainer_of(Net())) as trainer:
        trainer.export(tmp_path)
    with closing(trainer_of(model)) as trainer, pytest.raises(InputError, match="load it before"):
        trainer.load(tmp_path)
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())


def test_a_model_that_has_hooks_but_converts_nothing(tmp_path: Path) -> None:
    with closing(trainer_of(Net())) as trainer:
        trainer.step(*BATCHES[0])
        trainer.export(tmp_path)
        wanted = trainer.state_dict()
    with closing(trainer_of(Counted())) as trainer:
        trainer.load(tmp_path)
        found = trainer.state_dict()
    assert wanted is not None and found is not None
    assert all(torch.equal(found[key], one) for key, one in wanted.items())


def test_a_large_model_with_hooks_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piper.runtime.own_state_dict.LARGE", 0)
    with closing(trainer_of(Counted())) as trainer:
        trainer.export(tmp_path)
        with pytest.raises(InputError, match="may not load all of its tensors as in a file"):
            trainer.load(tmp_path)


@one_of(2)
@pytest.mark.parametrize("name", ["Renamed", "Converted", "Merged", "Swapped", "hook scales"])
def test_a_model_that_converts_what_it_saves_is_not_exported(name: str, tmp_path: Path) -> None:
    with closing(trainer_of(MODELS[name]())) as trainer:
        trainer.step(*BATCHES[0])
        with pytest.raises(InputError, match=r"export: the model's state_dict has"):
            trainer.export(tmp_path)
