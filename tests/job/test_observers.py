"""What only observes a step may be open around it: counters of FLOPs and calls, the profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from piper import Place, Split, Trainer, where

DRAW = torch.Generator().manual_seed(0)
BATCHES = torch.randn(4, 2, 8, 6, dtype=torch.float64, generator=DRAW)
CPU = torch.profiler.ProfilerActivity.CPU
PARTS = [Place(where(), [0]), Split("MB", 2)]


class CountsCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def inner_tracker() -> Iterator[None]:
    """Inside another mode."""
    with CountsCalls(), ModuleTracker(), FlopCounterMode(display=False):
        yield


OBSERVERS: dict[str, Callable[[], Any]] = {
    "FLOPs": lambda: FlopCounterMode(display=False),
    "calls": CountsCalls,
    "modules": ModuleTracker,
    "several": inner_tracker,
    "the profiler": lambda: torch.profiler.profile(activities=[CPU]),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(strategy: Any = PARTS) -> Trainer:
    example = tuple(BATCHES[0])
    return Trainer(model(), F.mse_loss, strategy, example=example, device="cpu", optimizer=sgd)


def plain_step(plain: nn.Module, x: Tensor, y: Tensor) -> float:
    optimizer = sgd(plain.parameters())
    optimizer.zero_grad()
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Trainer, nn.Module]]:
    made = trainer()
    yield made, model()
    made.close()


@one_of(2)
@pytest.mark.parametrize("name", OBSERVERS)
def test_steps_are_those_of_plain_pytorch(shared: tuple[Trainer, nn.Module], name: str) -> None:
    made, plain = shared
    for x, y in BATCHES:
        with OBSERVERS[name]():
            found = made.step(x, y).loss

        assert found == pytest.approx(plain_step(plain, x, y), rel=1e-12)


@one_of(2)
@pytest.mark.parametrize("strategy", [None, PARTS], ids=["one", "parts"])
def test_a_step_has_the_flops_of_plain_pytorch(strategy: Any) -> None:
    x, y = BATCHES[0]
    with FlopCounterMode(display=False) as expected:
        plain_step(model(), x, y)

    with FlopCounterMode(display=False):
        made = trainer(strategy)
    made.step(x, y)
    with FlopCounterMode(display=False) as found:
        made.step(x, y)

    assert found.get_total_flops() == expected.get_total_flops()
    assert found.get_total_flops() > 0


def test_observers_go_on_after_a_trace() -> None:
    """The modules of the user's own forward are still seen."""
    seen: list[set[str]] = []

    class Sees(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(set(tracker.parents))
            return super().forward(x)

    with ModuleTracker() as tracker:
        trainer()
        Sees(3, 3)(torch.ones(2, 3))

    assert seen == [{"Global", "Sees"}]


def test_global_hooks_of_the_user_are_part_of_the_model() -> None:
    """They are called for his modules, and not for the graphs that Piper makes of them."""
    made, plain = trainer(), model()
    made.step(*BATCHES[0])
    plain_step(plain, *BATCHES[0])
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        with FlopCounterMode(display=False):
            found = made.step(*BATCHES[1]).loss
        right = plain_step(plain, *BATCHES[1])
    finally:
        handle.remove()

    assert found == pytest.approx(right, rel=1e-12)
    assert made.step(*BATCHES[2]).loss == pytest.approx(plain_step(plain, *BATCHES[2]), rel=1e-12)
