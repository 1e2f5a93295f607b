"""Errors of the user's script: where in their own code, and what."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

PIPER = str(Path(__file__).parents[1])
HIDDEN = ("<frozen", "runpy.py")
LIBRARY = sysconfig.get_paths()["stdlib"]  # of Python, also from a virtual environment
INSTALLED = ("site-packages", "dist-packages", str(Path(sys.prefix) / "lib"), LIBRARY)


def shortened(error: BaseException) -> str:
    """A traceback of the user's own lines, and of the line that failed, wherever it is.

    Piper and installed libraries stay out of it, but for the last line.
    """
    whole = traceback.TracebackException.from_exception(error)
    for one in chain_of(whole):
        last = len(one.stack) - 1
        kept = [row for k, row in enumerate(one.stack) if k == last or is_own(row.filename)]
        one.stack = traceback.StackSummary.from_list(kept)
    return "".join(whole.format()).rstrip("\n")


def line_of(error: BaseException) -> str:
    """Where in the user's own code an error came up, as a line below it; empty if nowhere."""
    rows = traceback.extract_tb(error.__traceback__)
    own = [row for row in rows if is_own(row.filename)]
    if not own:
        return ""
    return f"\n  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}"


def chain_of(whole: traceback.TracebackException) -> list[traceback.TracebackException]:
    """An error, and those that it came from."""
    found: list[traceback.TracebackException] = []
    one: traceback.TracebackException | None = whole
    while one is not None:
        found.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return found


def is_own(file: str) -> bool:
    others = (PIPER, *HIDDEN, *INSTALLED)
    return not any(part in file for part in others)
