"""Whether a tool wants to see what a script would train.

It loads neither torch nor the compiler: a script that only starts processes needs none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_looking = False


def is_inspecting() -> bool:
    return _looking


@contextmanager
def looking() -> Iterator[None]:
    global _looking
    _looking = True
    try:
        yield
    finally:
        _looking = False
