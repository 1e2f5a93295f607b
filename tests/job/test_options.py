"""Options are written once as a value, and once in each signature that users see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any, get_type_hints

import pytest

from piper import Trainer, rehearse
from piper.errors import InputError
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
