"""Who calls: warnings name the user's line."""

from __future__ import annotations

import sys
from types import FrameType


def callers_level() -> int:
    """How many frames above the hook the user's call is: torch has several in between."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and module_of(frame).startswith(("torch.", "piper.", "copy")):
        frame, level = frame.f_back, level + 1
    return level


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
