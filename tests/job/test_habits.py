"""Habits of other systems, on a Trainer that is there: what to write is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import piper
from piper.errors import InputError, NoAttribute, PiperError

X, Y = torch.randn(4, 3), torch.randn(4, 3)
Call = Callable[[Any], Any]


@pytest.fixture(scope="module")
def trainer() -> Iterator[piper.Trainer]:
    with piper.Trainer(nn.Linear(3, 3), mse_loss, example=(X, Y), device="cpu") as found:
        yield found


HABITS: dict[str, tuple[Call, str]] = {
    "a rate in the optimizer": (
        lambda trainer: trainer.optimizer.param_groups[0],
        "it has no optimizer\n  fix: leave it out: trainer.step includes zero_grad, the backward "
        "and the optimizer's step; for the learning rate, give Trainer(lr_scheduler=...)",
    ),
    "train_step": (lambda trainer: trainer.train_step(X, Y), "fix: write trainer.step(batch)"),
    "optim": (lambda trainer: trainer.optim, "for the learning rate, give Trainer(lr_sch"),
    "a type of export": (
        lambda trainer: trainer.export("out", dtype=torch.float16),
        "export: it has no option dtype\n  fix: leave it out: weights are written in the type that",
    ),
    "a step of save": (
        lambda trainer: trainer.save("out", step=3),
        "save: it has no option step\n  fix: leave it out: a checkpoint has the number of its step",
    ),
    "an option that is none": (
        lambda trainer: trainer.save("out", colour=3),
        "save: it has no option colour\n  fix: it may have wait, keep, keep_every, loader, folder",
    ),
    "no folder": (
        lambda trainer: trainer.save(),
        "missing a required argument: 'folder'\n  fix: write trainer.save(folder, ...)",
    ),
    "a file of a checkpoint": (
        lambda trainer: trainer.save("runs/ck.pt"),
        "runs/ck.pt is the name of a file, and save writes a folder\n"
        '  fix: write trainer.save("runs/ck")',
    ),
    "a file of weights": (
        lambda trainer: trainer.export("out.safetensors"),
        'and export writes a folder\n  fix: write trainer.export("out")',
    ),
    "an accuracy": (
        lambda trainer: trainer.step(X, Y).acc,
        "metrics: a step has no acc\n  fix: write trainer.predict(*inputs), the output of the",
    ),
    "a loss by item": (
        lambda trainer: trainer.step(X, Y).item(),
        "fix: write .loss, which is a number of Python",
    ),
    "an array": (
        lambda trainer: trainer.step(X.numpy(), Y),
        "batch: input is a numpy.ndarray\n  fix: give tensors: torch.as_tensor(...)",
    ),
    "an array for predictions": (
        lambda trainer: trainer.predict(X.numpy()),
        "batch: input is a numpy.ndarray\n",
    ),
    "an array in an example": (
        lambda trainer: made(example=(X.numpy(), Y)),
        "example: input is a numpy.ndarray\n",
    ),
    "arrays of labels": (
        lambda trainer: trainer.step(X, {"a": Y.numpy()}),
        "batch: an entry of labels is a numpy.ndarray\n",
    ),
    "an object": (
        lambda trainer: trainer.step(object(), Y),
        "batch: input is of type object\n  fix: give tensors, numbers, strings, and lists",
    ),
    "a number of a device": (
        lambda trainer: made(device="cuda:1"),
        '\'cuda:1\' is not a device\n  fix: write "cuda" or "cpu"; each process has a GPU of its',
    ),
    "a rate as a function of the step": (
        lambda trainer: made(lr_scheduler=lambda step: 0.1),
        "lr_scheduler: it made the number 0.1, and no scheduler of an optimizer\n  fix: for a "
        "function of the step, write lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR, ",
    ),
    "a rate computed from the step": (
        lambda trainer: made(lr_scheduler=lambda step: step / 10),
        "for a function of the step, write lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR",
    ),
    "a scheduler that is none": (
        lambda trainer: made(lr_scheduler=lambda optimizer: {}),
        "lr_scheduler: it made dict, which is no scheduler of torch\n  fix: write lr_scheduler=",
    ),
}


def made(model: nn.Module | None = None, **options: Any) -> None:
    given = {"example": (X, Y), "device": "cpu", **options}
    with piper.Trainer(model or nn.Linear(3, 3), mse_loss, **given):
        pass


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_gets_what_to_write(name: str, trainer: piper.Trainer) -> None:
    call, message = HABITS[name]

    with pytest.raises(PiperError) as error:
        call(trainer)

    assert message in str(error.value)


def test_an_optimizer_of_the_models_own_parameters() -> None:
    model = nn.Linear(3, 3)

    with pytest.raises(PiperError) as error:
        made(model, optimizer=lambda named: torch.optim.SGD(model.parameters(), lr=0.1))

    assert "trains parameters that it was not given, such as those of model.parameters()\n" in str(
        error.value
    )
    assert "lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)" in str(error.value)


def test_other_attributes_of_metrics_are_unknown_as_in_python(trainer: piper.Trainer) -> None:
    metrics = trainer.step(X, Y)

    with pytest.raises(AttributeError) as error:
        _ = metrics.los  # type: ignore[attr-defined]

    assert not isinstance(error.value, NoAttribute) and error.value.obj is metrics
    assert not hasattr(metrics, "acc")


def test_a_folder_that_is_there_may_have_any_name(trainer: piper.Trainer, tmp_path: Path) -> None:
    (folder := tmp_path / "ck.pt").mkdir()

    trainer.save(folder)

    assert list(folder.iterdir())


def test_a_device_of_torch_is_a_device() -> None:
    made(device=torch.device("cpu"))
    with pytest.raises(InputError, match="0 is not a device"):
        made(device=0)
