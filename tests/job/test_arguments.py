"""What users get wrong at first is told with what to write instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from piper import Place, Split, Trainer, where
from piper.errors import CaptureError, InputError, PiperError
from piper.job.options import ADAMW as ADAMW_BY_DEFAULT
from piper.job.other_words import DEFAULT
from piper.names import amount

X, Y = torch.randn(4, 3), torch.randn(4, 3)
MODEL = nn.Linear(3, 3)
SGD = partial(torch.optim.SGD, lr=0.1)
MADE = SGD(nn.Linear(1, 1).parameters())
ADAMW = "write optimizer=partial(torch.optim.AdamW, lr=3e-4)"
NUMBERED = "write lr_scheduler=partial(StepLR, step_size=...)"
STEP = "write lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3)"
EXAMPLE = "give a batch: a tuple (x, y), or a dict of what the model takes"
NORM = "write a number above 0, or None"


def trainer(
    model: Any = MODEL,
    loss_fn: Any = functional.mse_loss,
    strategy: Any = None,
    example: Any = (X, Y),
    **options: Any,
) -> Trainer:
    return Trainer(model, loss_fn, strategy, **{"optimizer": SGD, **options, "example": example})


class OwnParallel(nn.DataParallel[nn.Linear]):
    """As repositories have them, to reach attributes of the module."""


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        (
            {"model": functional.mse_loss},
            "model: it is of type function",
            "model first, and then loss_fn",
        ),
        (
            {"loss_fn": 1.0},
            "loss_fn: it is of type float",
            "a function of (output, labels), or None if the model",
        ),
        (
            {"optimizer": MADE},
            "optimizer: it is of type SGD, already made",
            "write optimizer=partial(torch.optim.SGD, lr=0.1)",
        ),
        ({"optimizer": None}, "optimizer: it is None", ADAMW),
        ({"optimizer": lambda: MADE}, "optimizer: it cannot be called with parameters", ADAMW),
        ({"optimizer": torch.optim.Muon}, "Muon only supports 2D parameters", "as AdamW does"),
        ({"lr_scheduler": StepLR(MADE, 3)}, "it is of type StepLR, already made", STEP),
        ({"lr_scheduler": StepLR}, "lr_scheduler: it cannot be called with an optimizer", NUMBERED),
        ({"max_nrom": 1.0}, "Trainer: it has no option max_nrom", "write max_norm=..."),
        ({"grad_clip": 1.0}, "Trainer: it has no option grad_clip", "write max_norm=1.0, the norm"),
        (
            {"lr": 1e-3, "weight_decay": 0.2},
            "Trainer: it has no option lr",
            "write optimizer=partial(torch.optim.AdamW, lr=0.001, weight_decay=0.2); the default "
            "is partial(torch.optim.AdamW, lr=3e-4), and torch's own for the rest, such as "
            "weight_decay=0.01",
        ),
        (
            {"gradient_accumulation_steps": 4},
            "no option gradient_accumulation_steps",
            "strategies.one_f_one_b(pp=1, microbatches=4)",
        ),
        ({"mixed_precision": "bf16"}, "no option mixed_precision", "write precision='bf16'"),
        ({"bf16": True}, "no option bf16", 'write precision="bf16"'),
        (
            {"colour": 1.0},
            "Trainer: it has no option colour",
            "it may have optimizer, lr_scheduler, ",
        ),
        ({"max_norm": -1.0}, "max_norm: -1.0 is not a norm", NORM),
        ({"max_norm": "1.0"}, "max_norm: '1.0' is not a norm", NORM),
        ({"max_norm": True}, "max_norm: True is not a norm", NORM),
        ({"strategy": "1f1b"}, "strategy: it is a string, '1f1b'", "piper.strategies.one_f_one_b("),
        ({"example": None}, "example: it is None", EXAMPLE),
        (
            {"loss_fn": [Place(where(), [0])]},
            "loss_fn seems to be left out",
            "loss_fn comes second",
        ),
        ({"loss_fn": nn.MSELoss}, "loss_fn: it is the class MSELoss", "write MSELoss(), with the"),
        ({"model": nn.Linear}, "model: it is the class Linear", "write Linear(...), with the"),
        ({"model": nn.DataParallel(nn.Linear(3, 3))}, "it is in a DataParallel", "(model.module)"),
        ({"model": OwnParallel(nn.Linear(3, 3))}, "it is in a DataParallel", "(model.module)"),
        ({"criterion": nn.MSELoss()}, "it has no option criterion", "write loss_fn=..."),
        ({"example": iter([X])}, "example: it is an iterator", EXAMPLE),
        ({"example": X}, "example: it is one tensor: with a loss_fn that is the label", "(x, y)"),
        (
            {"example": (X.numpy(), Y.numpy())},
            "example: input is a numpy.ndarray",
            "torch.as_tensor",
        ),
        ({"example": (X[:0], Y[:0])}, "batch: it has no rows", "leave out empty batches"),
        (
            {"strategy": [Place(where(PP=0), [0])]},
            "no region has the tag PP",
            'write Stage("PP", n) before this directive, or where() for the whole model',
        ),
        (
            {"strategy": [Place(where(BLOCK=0), [0])]},
            "no region has the tag BLOCK: the model has no annotations",
            'write where() for the whole model; or `with piper.annotate("BLOCK"):` around',
        ),
    ],
)
def test_what_is_wrong_is_told(given: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(PiperError) as error:
        trainer(**given)

    told, _, advice = str(error.value).partition("\n  fix: ")
    assert what in told
    assert fix in advice


def test_a_trainer_prints_what_it_trains_and_how_far(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(3, 3)
    net.bias.requires_grad_(False)
    strategy = [Place(where(), [0]), Split("MB", 2)]

    with (
        caplog.at_level("INFO", "piper"),
        Trainer(net, functional.mse_loss, strategy, example=(X, X), device="cpu") as found,
    ):
        found.step(X, X)

        assert repr(found) == (
            "Trainer of Linear (12 parameters, 9 of them trained): 1 device, 1 replica, "
            "2 microbatches, 1 step done; strategy of Place, Split"
        )
    assert "9 of 12 parameters are trained (75 %), the others are frozen" in caplog.messages


def test_the_default_that_errors_name_is_the_default() -> None:
    assert {name: float(one) for name, one in DEFAULT.items()} == ADAMW_BY_DEFAULT.keywords


@pytest.mark.parametrize(("batch", "count"), [((X,), 1), ((X, Y, X), 3), (([X, Y, X],), 3)])
def test_a_step_has_the_arguments_of_the_example(batch: Any, count: int) -> None:
    with pytest.raises(PiperError) as error:
        trainer().step(*batch)

    what = f"batch: step was given {amount(count, 'argument')}, but the example has 2: "
    assert str(error.value).startswith(what)
    assert str(error.value).endswith("\n  fix: give step what the example has")


def test_a_step_may_have_other_arguments_that_the_model_takes() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x if mask is None else x * mask)

    found = trainer(Masked(3, 3), max_norm=torch.tensor(2.0))

    assert found.step(X, torch.ones(4, 3), Y).loss > 0
    assert found.step(X, Y).loss > 0


def test_what_processes_cannot_send_each_other_is_not_gathered() -> None:
    found = trainer()

    assert found.gather({"names": ("a", "b"), "count": 3}) == [{"names": ("a", "b"), "count": 3}]
    with pytest.raises(InputError) as error:
        found.gather(X.numpy())
    assert str(error.value) == (
        "gather: objects of the class ndarray do not travel between processes\n"
        "  fix: give tensors, numbers and text, or lists, tuples and dicts of them"
    )


def test_an_error_of_the_model_names_its_line() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ x

    with pytest.raises(CaptureError, match="RuntimeError: .* dim") as error:
        trainer(Twice(3, 3))

    assert error.value.where.startswith("test_arguments.py:")
    assert "\n    the batch has " in str(error.value)


def test_an_argument_that_is_given_twice() -> None:
    with pytest.raises(InputError) as found:
        Trainer(MODEL, functional.mse_loss, None, strategy=None, example=(X, Y))  # type: ignore[misc]

    assert str(found.value) == (
        "Trainer: multiple values for argument 'strategy'\n"
        "  fix: write Trainer(model, loss_fn, strategy, example=...), and options by name; loss_fn "
        "may be None if the model computes its loss, and strategy for one device"
    )


def test_a_lazy_model_is_refused_before_processes_compare_it() -> None:
    with pytest.raises(CaptureError, match="it is lazy: its shape is not known yet"):
        trainer(nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 3)))
