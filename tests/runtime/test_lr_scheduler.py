"""Learning rates that change from step to step: as with one optimizer for everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import one_of
from replicas import Net, data
from shared_capture import one_model
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from piper import Place, Replicate, Split, Trainer, annotate, rehearse, where
from piper.errors import StrategyError
from piper.runtime.state.device_state import DeviceState
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MAKERS: dict[str, Callable[..., Any]] = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=9),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    ),
}
STRATEGIES = {
    "pipeline": one_f_one_b(pp=2, microbatches=2),
    **{
        f"zero={zero}": [
            Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=zero), Split("MB", 2)
        ]
        for zero in range(4)
    },
}  # fmt: skip


NET, GROWING = one_model(), one_model()


def trained(strategy: Any, given: Any, **options: Any) -> Any:
    with NET():
        return rehearse(Net(), functional.mse_loss, strategy, given, **options)


def batches() -> Any:
    return [*data(), *data()]


def plainly(make: Callable[..., Any]) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = SGD(list(model.named_parameters()))
    scheduler = make(optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@one_of(2)
@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        pytest.param(
            STRATEGIES[strategy], MAKERS[make], id=f"{strategy}-{make}",
            marks=pytest.mark.soak if (k + m) % 3 else (),
        )
        for k, strategy in enumerate(STRATEGIES)
        for m, make in enumerate(MAKERS)
    ],
)  # fmt: skip
def test_every_step_has_its_rate(strategy: Any, make: Callable[..., Any]) -> None:
    found = trained(strategy, batches(), optimizer=SGD, lr_scheduler=make)

    for name, tensor in plainly(make).items():
        torch.testing.assert_close(found.parameters[name], tensor, rtol=1e-12, atol=1e-14)


def test_tuning_is_no_step_and_other_shapes_go_on() -> None:
    make = MAKERS["lambda"]
    x, y = batches()[0]
    trainer = Trainer(
        Net(), functional.mse_loss, optimizer=SGD, lr_scheduler=make, example=(x, y), device="cpu"
    )
    trainer.step(x, y)
    trainer.tune(x, y)
    trainer.step(x[:2], y[:2])

    optimizers = trainer._programs.state.optimizers().values()
    assert {group["lr"] for one in optimizers for group in one.param_groups} == {0.1 / 3}
    trainer.close()


class Growing(nn.Module):
    """Short batches do not use the second layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.more = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            x = torch.tanh(self.first(x))
        with annotate("PP"):
            return self.more(x) if x.shape[0] > 4 else x * 2


def grown(sizes: list[int]) -> list[tuple[torch.Tensor, ...]]:
    return [(x[:n], y[:n]) for (x, y), n in zip(batches(), sizes, strict=False)]


@one_of(2)
@pytest.mark.parametrize("saved", [None, 1, 3])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 8, 8], [8, 4, 8, 4, 8]])
def test_parameters_that_are_not_used_in_a_step_have_its_rate_later(
    sizes: list[int], saved: int | None, tmp_path: Path
) -> None:
    """Also of a run that was saved before they were met."""
    make, data, model = MAKERS["cosine"], grown(sizes), Growing()
    optimizer = SGD(list(model.named_parameters()))
    scheduler, wanted = make(optimizer), []
    for x, y in data:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        wanted.append(loss.item())

    with GROWING():
        found = grown_losses(data, saved, tmp_path / "run")

    assert found == pytest.approx(wanted, rel=1e-12)


def grown_losses(data: Any, saved: int | None, folder: Path) -> list[float]:
    trainer, found = growing(data[0]), []
    for step, batch in enumerate(data):
        if step == saved:
            trainer.save(folder)
            trainer.close()
            trainer = growing(batch)
            trainer.resume(folder)
        found.append(trainer.step(*batch).loss)
    trainer.close()
    return found


def growing(example: tuple[torch.Tensor, ...]) -> Trainer:
    return Trainer(
        Growing(), functional.mse_loss, optimizer=SGD, lr_scheduler=MAKERS["cosine"],
        example=example, device="cpu",
    )  # fmt: skip


def test_a_rate_that_is_a_tensor_is_one_for_each_optimizer() -> None:
    make = partial(lr_scheduler.ExponentialLR, gamma=0.5)
    tensor = partial(torch.optim.SGD, lr=torch.tensor(0.1, dtype=torch.float64))
    number = partial(torch.optim.SGD, lr=0.1)
    runs = [
        trained(STRATEGIES["pipeline"], batches(), optimizer=kind, lr_scheduler=make)
        for kind in (tensor, number)
    ]

    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-12)


def another(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ConstantLR(SGD(Net().parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lr_scheduler.ReduceLROnPlateau,
            "lr_scheduler: it made ReduceLROnPlateau, which needs more than the number of steps\n"
            "  fix: write lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, "
            "T_max=1000), or another scheduler that needs only the number of steps",
        ),
        (
            another,
            "lr_scheduler: it made a scheduler for an optimizer that it was not given\n"
            "  fix: make a new one at each call: every bucket of parameters has its own "
            "optimizer",
        ),
    ],
)
def test_what_does_not_go_by_steps_is_refused(make: Any, message: str) -> None:
    with pytest.raises(StrategyError) as refused:
        trained(STRATEGIES["zero=3"], data(), lr_scheduler=make)

    assert str(refused.value) == message


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler.step")
def test_no_scheduler_is_called_early() -> None:
    """Those of parameters that a step does not update are stepped, too."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))])
    unused = SimpleNamespace(optimizer=optimizer, scheduler=MAKERS["cosine"](optimizer))

    DeviceState(torch.device("cpu"), {"unused": unused}).advance()  # type: ignore[dict-item]

    assert optimizer.param_groups[0]["lr"] < 0.1
