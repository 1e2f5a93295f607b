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
        return Cost(**{one.name: _by_phase(one.name, found[one.name]) for one in fields(Cost)})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # written by hand, or by another version


def _by_phase(what: str, found: dict[str, Any]) -> dict[Phase, Any]:
    read = PAIRS.get(what, _number)
    return {Phase(name): read(one) for name, one in found.items()}


def _pairs(some: list[Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple(map(_pair, some))


def _pair(one: Any) -> tuple[Any, Any]:
    first, second = map(_number, one)
    return first, second


PAIRS = {"fused": _pair, "expert_workspace": _pairs, "fused_expert_workspace": _pairs}


def _number(one: Any) -> Any:
    if type(one) not in (int, float):
        raise ValueError("not a number")
    return one
