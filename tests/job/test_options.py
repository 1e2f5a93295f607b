"""Options are written once as a value, and once in each signature that users see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any, get_type_hints

import pytest
import torch

from piper import Precision, Trainer, rehearse
from piper.errors import InputError, PiperError
from piper.job.options import Options

OWN = {"model", "loss_fn", "strategy", "example", "timeout", "batches", "watch", "log"}
DEFAULTS = {one.name: one.default for one in fields(Options)}


@pytest.mark.parametrize(
    ("call", "others"),
    [(Trainer, {}), (rehearse, {"device": "cpu", "graphs": False})],
    ids=["Trainer", "rehearse"],
)
def test_signatures_have_the_options(call: Callable[..., Any], others: dict[str, Any]) -> None:
    known = signature(call).parameters.values()

    assert {p.name: p.default for p in known if p.name not in OWN} == DEFAULTS | others


@pytest.mark.parametrize("call", [Trainer.__init__, rehearse], ids=["Trainer", "rehearse"])
def test_the_types_of_options_are_the_same_everywhere(call: Callable[..., Any]) -> None:
    types, found = get_type_hints(Options), get_type_hints(call)

    assert types.pop("device") == found.pop("device") | None
    assert {name: found[name] for name in types} == types


def test_a_misspelled_option_of_a_rehearsal_is_told() -> None:
    with pytest.raises(InputError) as error:
        rehearse(None, None, None, [], sede=1)  # type: ignore[call-arg]

    assert str(error.value) == "rehearse: it has no option sede\n  fix: write seed=..."


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Options().seed = 1  # type: ignore[misc]


WRONG: dict[str, Any] = {
    "seed": ["a", 1.5, -1, 2**63], "timeout": ["a", float("nan"), 0, -1], "compiled": ["x"],
    "no_decay": [5, "bias", [1]], "whole": [5, "mask"], "init": [5], "costs": [5],
}  # fmt: skip
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_values_of_another_kind_are_named_at_once(name: str, value: Any) -> None:
    x = torch.zeros(2, 3)

    with pytest.raises(InputError, match=f"^{name}: .* is no"):
        Trainer(torch.nn.Linear(3, 3), None, None, example=x, device="cpu", **{name: value})


def test_a_loss_scale_is_one() -> None:
    with pytest.raises(PiperError, match="loss_scale=5 is not a LossScale"):
        Precision(compute="float16", loss_scale=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_named(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=layout)
    model, loss = torch.nn.Linear(3, 3), torch.nn.functional.mse_loss

    with pytest.raises(InputError, match=r"is nested.*\n  fix: give tensor.to_padded_tensor"):
        Trainer(model, loss, None, example=(x, torch.zeros(2)), device="cpu")


def test_batches_without_values_or_rows_are_named() -> None:
    x = torch.eye(3)
    model, loss = torch.nn.Linear(3, 3), torch.nn.functional.mse_loss
    with pytest.raises(InputError, match="example: a tensor of .* is sparse"):
        Trainer(model, loss, None, example=(x.to_sparse(), x), device="cpu")
    with Trainer(model, loss, None, example=(x.to("meta"), x), device="cpu") as trainer:
        for call, given in ((trainer.step, (x, x)), (trainer.predict, (x,))):
            with pytest.raises(InputError, match="batch: a tensor of .* is on meta"):
                call(given[0].to("meta"), *given[1:])
            with pytest.raises(InputError, match="batch: a tensor of .* is sparse"):
                call(given[0].to_sparse(), *given[1:])
        trainer.step(x, x)
