"""Settings of torch, and levels of loggers, that a forward asks for: each has its program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Trainer, where
from piper.capture.python_state.watch import Watch

LOG = logging.getLogger("a model")


@contextmanager
def setting(ask: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = ask()
    put(value)
    try:
        yield
    finally:
        put(before)


def flag(owner: Any, name: str) -> Any:
    """Another value of a flag, and back."""
    ask = lambda: getattr(owner, name)  # noqa: E731
    return setting(ask, lambda value: setattr(owner, name, value), not ask())


def strict(value: bool) -> None:
    torch.use_deterministic_algorithms(value)


cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {  # what is asked, and a change
    "precision of products": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda: setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
        ),
    ),
    "determinism": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: setting(torch.are_deterministic_algorithms_enabled, strict, True),
    ),
    "default dtype": (
        lambda: torch.get_default_dtype() == torch.bfloat16,
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    ),
    "seed": (lambda: torch.initial_seed() == 7, lambda: seeded(7)),
    "benchmark": (lambda: torch.backends.cudnn.benchmark, lambda: flag(cudnn, "benchmark")),
    "deterministic": (
        lambda: torch.backends.cudnn.deterministic, lambda: flag(cudnn, "deterministic"),
    ),
    "tf32": (
        lambda: torch.backends.cuda.matmul.allow_tf32, lambda: flag(cuda.matmul, "allow_tf32"),
    ),
    "flash attention": (
        lambda: torch.backends.cuda.flash_sdp_enabled(),
        lambda: setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    ),
    "level of a logger": (
        lambda: LOG.isEnabledFor(logging.DEBUG),
        lambda: setting(lambda: LOG.level, LOG.setLevel, logging.DEBUG),
    ),
    "level of all loggers": (
        lambda: LOG.getEffectiveLevel() == 17,
        lambda: setting(lambda: logging.root.level, logging.root.setLevel, 17),
    ),
}  # fmt: skip


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    yield
    torch.set_rng_state(before)


class Net(nn.Module):
    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.a, self.ask = nn.Linear(3, 3), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (2.0 if self.ask() else 1.0)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_read_is_watched(name: str) -> None:
    ask, change = SETTINGS[name]
    net = Net(ask)
    seen = Watch(net, None)

    assert seen.now() == 0
    with change():
        assert seen.now() != 0
    assert seen.now() == 0


def test_one_that_nobody_reads_is_not() -> None:
    seen = Watch(Net(lambda: True), None)

    for _, change in SETTINGS.values():
        with change():
            assert seen.now() == 0


def test_training_follows_it() -> None:
    ask, change = SETTINGS["precision of products"]
    net, x = Net(ask), torch.ones(2, 3)
    optimizer = torch.optim.SGD
    given = {"example": (x, x), "optimizer": lambda p: optimizer(p, lr=0.0), "device": "cpu"}
    trainer = Trainer(net, F.mse_loss, [Place(where(), [0])], **given)

    plain = trainer.step(x, x).loss
    with change():
        other = trainer.step(x, x).loss
        expected = F.mse_loss(Net.forward(net, x), x).item()
    trainer.close()

    assert other == pytest.approx(expected)
    assert other != pytest.approx(plain)
