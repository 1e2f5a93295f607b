"""How many cases a test draws: few by default, and many under `make soak`.

A test that asks for it is marked `drawn`, so that `make soak` runs it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

SOAK = bool(os.environ.get("PIPER_SOAK"))

drawn = pytest.mark.drawn
one_of = pytest.mark.one_of  # `@one_of(4)`: about one of four cases runs, and the others are soaks


def draws(few: int, many: int) -> int:
    return many if SOAK else few


def every(nth: int, cases: Iterable[Any], names: Iterable[str] | None = None) -> list[Any]:
    """Every nth case; the others are soaks."""
    cases = list(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name,
            marks=pytest.mark.soak if k % nth else (),
        )
        for k, (case, name) in enumerate(zip(cases, names or [None] * len(cases), strict=True))
    ]  # fmt: skip


def levels_of(
    names: Iterable[Any], levels: Sequence[Any], nth: int = 1, first: int = 0
) -> list[object]:
    """Every schedule, say, with every level. All but one level of each schedule are soaks, such
    that each level is among the rest. With `nth`, every nth schedule only, from the `first` on."""
    names = list(names)
    some = enumerate(names[first::nth])
    kept = {name: levels[k % len(levels)] for k, name in some}
    return [
        pytest.param(name, level, marks=() if level == kept.get(name) else pytest.mark.soak)
        for name in names
        for level in levels
    ]
