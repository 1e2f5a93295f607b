"""Scripts that end by `sys.exit`, or whose arguments argparse refuses: in every process alike."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from piper.launcher.script_errors import is_own

MESSAGES = "_print_message"  # what an ArgumentParser writes usage, help and errors with


@contextmanager
def usage_held(first: bool) -> Iterator[list[str]]:
    """What argparse says of wrong arguments, which every process would print. `first`: help too."""
    held: list[str] = []
    real = getattr(argparse.ArgumentParser, MESSAGES)

    def hold(parser: argparse.ArgumentParser, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            held.append(message or "")
        elif first:
            real(parser, message, file)

    setattr(argparse.ArgumentParser, MESSAGES, hold)
    try:
        yield held
    finally:
        setattr(argparse.ArgumentParser, MESSAGES, real)
        if first and not isinstance(sys.exception(), SystemExit):
            sys.stderr.write("".join(held))  # the script went on


def left(error: SystemExit, usage: str) -> tuple[int, str]:
    """The exit code, and why it is not 0. The argument of `sys.exit` is a code, None or a text."""
    if error.code is None or error.code == 0:
        return 0, ""
    code = error.code if isinstance(error.code, int) else 1
    text = f"its script ended with sys.exit({error.code!r})"
    if isinstance(error.code, str) and "\n" in error.code:
        text = f"its script ended with sys.exit:\n{error.code}"
    return code, usage or f"{text}\n{place(error)}"


def place(error: SystemExit) -> str:
    """The last line of the script's own, and not one of the library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""
