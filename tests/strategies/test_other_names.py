"""What others call strategies, and sizes that are no numbers: what to write is told."""

from __future__ import annotations

from typing import Any

import pytest

from piper import Strategy, strategies
from piper.errors import InputError, StrategyError
from piper.strategies.other_names import MEANT


@pytest.mark.parametrize("name", MEANT)
def test_names_of_others_lead_to_a_builder(name: str) -> None:
    with pytest.raises(InputError, match=f"there is no {name}\n  fix: write strategies.") as error:
        getattr(strategies, name)

    call = str(error.value).rpartition("fix: write ")[2]
    call += "" if "(" in call else "(pp=2, microbatches=4)"
    made = eval(call, {"strategies": strategies, "N": 2})
    assert isinstance(made, Strategy)
    assert not hasattr(strategies, name)


def test_other_names_are_unknown_as_in_python() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'gpip'") as error:
        strategies.gpip  # type: ignore[attr-defined]  # noqa: B018

    assert error.value.name == "gpip" and error.value.obj is None  # else Python adds its own hint


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ({"pp": 2.0}, "pp=2.0 is not a whole number", "write pp=2"),
        ({"pp": "2"}, "pp='2' is not a whole number", "write pp=2"),
        ({"microbatches": 4.5}, "microbatches=4.5 is not a whole number", "write microbatches=4"),
        ({"dp": "two"}, "dp='two' is not a whole number", "write dp=2"),
        ({"tp": 2.0}, "tp=2.0 is not a whole number", "write tp=2"),
        ({"world_size": 2}, "a schedule has no option world_size", "write dp=..."),
    ],
)
def test_sizes_are_whole_numbers(given: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(StrategyError) as error:
        strategies.one_f_one_b(**{"pp": 2, "microbatches": 4, **given})

    assert str(error.value).partition(": ")[2] == f"{what}\n  fix: {fix}"
