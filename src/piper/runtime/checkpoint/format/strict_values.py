"""Numbers, names and JSON of files that anybody may have written, checked before they are used."""

from __future__ import annotations

import json
import os
from typing import Any

LARGEST = 2**63  # bytes, elements or steps: what the system can count
LONGEST = 255  # bytes in the name of a file
# What parsing and decoding raise if a document is not what it should be. RuntimeError is torch's,
# and RecursionError is one: lists in lists, too deep to follow.
WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError)


def parsed_json(content: bytes | str) -> Any:
    """
    >>> parsed_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def count(value: Any) -> int:
    """A number of things.

    >>> count(3)
    3
    >>> count(float("inf"))
    Traceback (most recent call last):
    ValueError: inf is not a number of things
    """
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{str(value)[:20]} is not a number of things")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{str(value)[:20]} is not a text")
    return value


def plain_name(value: Any) -> str:
    """The name of a file in the folder, and of none elsewhere."""
    name = text(value)
    content = os.fsencode(name)
    if content in (b"", b".", b"..") or not {*b"/\0"}.isdisjoint(content) or len(content) > LONGEST:
        raise ValueError(f"the name of a file, {name[:40]!r}")
    return name
