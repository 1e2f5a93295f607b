"""What kind of value each option takes, where a wrong one would only fail somewhere inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from piper.costs import Costs
from piper.errors import InputError

LARGEST_SEED = 2**40  # it is multiplied by the number of a step
Kind = tuple[Callable[[Any], bool], str, str]  # a test, what is expected, and what to write


def is_names(given: Any) -> bool:
    return (
        isinstance(given, Iterable)
        and not isinstance(given, str)
        and all(isinstance(one, str) for one in given)
    )


KINDS: dict[str, Kind] = {
    "seed": (
        lambda given: type(given) is int and 0 <= given < LARGEST_SEED,
        f"a whole number from 0 to {LARGEST_SEED - 1}",
        "seed=0",
    ),
    "compiled": (lambda given: isinstance(given, bool), "True or False", "compiled=True"),
    "no_decay": (is_names, "a list of names", 'no_decay=["bias", "norm"]'),
    "whole": (lambda given: given is None or is_names(given), "a list of names", 'whole=["mask"]'),
    "init": (
        lambda given: given is None or callable(given),
        "a function of a name and a tensor",
        "init=lambda name, tensor: tensor.normal_(0, 0.02)",
    ),
    "costs": (
        lambda given: given is None or isinstance(given, Costs | str | Path),
        "costs, the name of a data sheet, or a file",
        'costs="h200"',
    ),
}


def refuse_wrong_kinds(**given: Any) -> None:
    for name, value in given.items():
        fits, expected, example = KINDS[name]
        if not fits(value):
            what = f"{value!r} is not {expected}"
            raise InputError.of(name, what, f"write {example}")
