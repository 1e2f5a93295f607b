"""Hostile changes of JSON: a value of a document becomes something that no writer writes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

GONE = object()  # in place of a value: there is none
VALUES: tuple[Any, ...] = (
    GONE, None, True, -1, 0, 3.5, 2**70, 10**400, 1e308, float("inf"), float("nan"), "", "x", "9",
    "../x", "/etc/passwd", "a\0b", "\ud800", "9" * 5000, "__class__", "load", [], {}, [[]],
    {"": None}, [None, None],
)  # fmt: skip
DEEP = "[" * 100_000  # no parser follows it
Place = tuple[str | int, ...]


def places(document: Any, at: Place = ()) -> Iterator[Place]:
    """Where the values of a document are."""
    if at:
        yield at
    inside: Any = enumerate(document) if isinstance(document, list) else ()
    for key, one in document.items() if isinstance(document, dict) else inside:
        yield from places(one, (*at, key))


def changed(document: Any, at: Place, to: Any) -> Any:
    """A copy in which one value is another."""
    found = copy.deepcopy(document)
    *path, last = at
    owner = found
    for key in path:
        owner = owner[key]
    if to is GONE:
        del owner[last]
    else:
        owner[last] = to
    return found
