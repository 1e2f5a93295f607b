"""Updates that follow each other are one call of torch.optim, and give the same bits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from shared_capture import one_model
from torch import nn

from piper import Order, Place, Replicate, Split, Strategy, annotate, rehearse, where
from piper.runtime import joined_runs
from piper.runtime.optimizers.known_optimizers import ELEMENTWISE

LAYERS, CAPTURED = 4, one_model()
ONE = [Place(where(), [0]), Split("MB", 2)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with annotate("L"):
                x = torch.tanh(layer(x))
        return x


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=draw), torch.randn(4, 3, generator=draw)) for _ in "abcd"]


def trained(
    monkeypatch: pytest.MonkeyPatch, kind: str, joined: bool, strategy: Any = None, **options: Any
) -> tuple[dict[str, torch.Tensor], int]:
    """The parameters after four steps, and the calls of the optimizer."""
    torch.manual_seed(0)
    model, calls, optimizer = Layers(), Counter[str](), getattr(torch.optim, kind)
    step: Callable[..., Any] = optimizer.step
    caller = threading.current_thread()

    def counted(self: Any, *args: Any) -> Any:
        calls[kind] += threading.current_thread() is not caller  # which tries the optimizer
        return step(self, *args)

    with monkeypatch.context() as patch, CAPTURED():
        patch.setattr(optimizer, "step", counted)
        if not joined:
            patch.setattr(joined_runs, "with_joined_updates", lambda _, acts: acts)
        make = partial(optimizer, lr=options.pop("lr", 0.01), **options.pop("settings", {}))
        given = strategy or Strategy(ONE)
        found = rehearse(model, nn.functional.mse_loss, given, data(), optimizer=make, **options)
    return dict(found.parameters), calls[kind]


def must_be_equal(monkeypatch: pytest.MonkeyPatch, kind: str, calls: int, **options: Any) -> None:
    ours, fewer = trained(monkeypatch, kind, True, **dict(options))
    theirs, all_calls = trained(monkeypatch, kind, False, **dict(options))
    assert (fewer, all_calls) == (calls, 4 * LAYERS)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@one_of(2)
@pytest.mark.parametrize("kind", every(3, ELEMENTWISE))
def test_every_optimizer_that_treats_elements_by_themselves(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_be_equal(monkeypatch, kind, 4)


WARM = partial(torch.optim.lr_scheduler.LinearLR, total_iters=3)
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"max_norm": 0.1, "lr_scheduler": WARM}),
    ("AdamW", {"settings": {"betas": [0.8, 0.9], "foreach": True}, "precision": "bf16"}),
    ("AdamW", {"no_decay": ["bias"], "ema": 0.9}),
    ("SGD", {"settings": {"momentum": 0.9, "nesterov": True}, "on_nan": "skip"}),
    ("AdamW", {"settings": {"fused": True}, "lr_scheduler": WARM}),
]


@pytest.mark.parametrize(("kind", "options"), every(2, OPTIONS))
@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
def test_options_of_a_trainer(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    must_be_equal(monkeypatch, kind, 4, **options)


def test_an_order_that_updates_early_stays_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer before the last backward of the first, the others together."""
    last, first = where(L=LAYERS - 1, PASS="UPDATE"), where(L=0, MB=1, PASS="B")
    strategy = Strategy([*ONE, Order([[last], [first]])])

    must_be_equal(monkeypatch, "AdamW", 8, strategy=strategy)


def test_an_update_does_not_wait_for_messages_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for its own all-reduce; after the norm of all, none waits for any."""
    replicas = [Place(where(), [0, 1]), Replicate(where(), [0, 1], bucket_mb=1), Split("MB", 2)]

    _, apart = trained(monkeypatch, "AdamW", True, strategy=Strategy(replicas))
    _, together = trained(monkeypatch, "AdamW", True, strategy=Strategy(replicas), max_norm=1.0)

    assert (apart, together) == (2 * 4 * LAYERS, 2 * 4)


def test_an_optimizer_with_a_step_of_its_own_is_called_for_each_bucket() -> None:
    seen: list[int] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    with CAPTURED():
        rehearse(
            Layers(), nn.functional.mse_loss, Strategy(ONE), data(), optimizer=partial(Noting, lr=1)
        )

    assert max(seen) == 2 and len(seen) >= 4 * LAYERS  # a layer has two parameters
