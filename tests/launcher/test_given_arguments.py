"""`piper.launch` refuses arguments that do not fit before it starts a process."""

from __future__ import annotations

from typing import Any

import pytest

import piper
from piper.errors import InputError
from piper.launcher.given_arguments import refuse_unfit


def train(steps: int, *, rate: float = 0.1) -> None:
    pytest.fail("started")


@pytest.mark.parametrize(
    ("given", "named", "words"),
    [
        ((), {}, "cannot be called like this: missing a required argument: 'steps'"),
        ((1, 2), {}, "takes 1 argument by position, not 2"),
        ((1,), {"rat": 0.1}, "did you mean rate?"),
        ((), {"rate": 0.1}, "missing a required argument: 'steps'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    given: tuple[Any, ...], named: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as refused:
        piper.launch(train, 2, *given, **named)

    said = str(refused.value)
    assert words in said
    line = f"line {train.__code__.co_firstlineno} of test_given_arguments.py,"
    assert f"train(steps, rate=0.1), {line}" in said
    assert said.endswith("fix: write piper.launch(train, 2, steps, rate=0.1)")


def test_arguments_that_fit_are_not() -> None:
    refuse_unfit(train, 2, (1,), {"rate": 0.2})
    refuse_unfit(print, 2, (1, 2, 3), {"sep": " "})
    refuse_unfit(lambda *numbers, **names: None, 2, (1, 2), {"a": 1})
