"""What the phases of a region take, kept on disk beside the derivative that it was counted for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from piper.capture.cache.folder import folder_in
from piper.capture.description.description import Cost
from piper.names import Phase


def known_cost(entry: str | None, code: str, count: Callable[[], Cost]) -> Cost:
    """The cost of a region. `entry`: the key of its derivative; `code`: how that is cut."""
    folder = folder_in() if entry is not None else None
    if folder is None:
        return count()
    key = hashlib.sha256(repr(("cost", entry, code)).encode()).hexdigest()
    text = folder.read(key)
    found = None if text is None else cost_in(text)
    if found is None:
        found = count()
        folder.write(key, json.dumps(asdict(found)))
    return found


def cost_in(text: str) -> Cost | None:
    """
    >>> cost_in('{"flops": {"F": 2.0}}'), cost_in("[1]"), cost_in("{")
    (None, None, None)
    """
    try:
        found = json.loads(text)
        return Cost(**{one.name: _by_phase(found[one.name]) for one in fields(Cost)})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # written by hand, or by another version


def _by_phase(found: dict[str, Any]) -> dict[Phase, Any]:
    return {Phase(name): _number(one) for name, one in found.items()}


def _number(one: Any) -> Any:
    if isinstance(one, list):
        size, count = map(_number, one)
        return size, count
    if type(one) not in (int, float):
        raise ValueError("not a number")
    return one
