"""Dictionaries that keep what was used last: their order is the order of use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def recent(
    known: dict[Key, Value], key: Key, make: Callable[[], Value], most: int
) -> tuple[Value, list[Key]]:
    """The value of a key, made if it is new; and the keys that were forgotten for it.

    >>> known = {"a": 1, "b": 2}
    >>> recent(known, "a", lambda: 0, 2), recent(known, "c", lambda: 3, 2)
    ((1, []), (3, ['b']))
    >>> known
    {'a': 1, 'c': 3}
    """
    value = known.pop(key) if key in known else make()
    known[key] = value
    old = list(known)[: max(len(known) - most, 0)]
    for one in old:
        del known[one]
    return value, old
