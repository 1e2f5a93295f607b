"""One line at the bottom of a terminal that changes, while the script prints other lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from typing import Any, TextIO

CLEAR = "\r\x1b[K"  # the line of the cursor


class Shared:
    """Stands for stdout or stderr: what the script prints begins on a line of its own."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        self.stream, self.line = stream, line

    def write(self, text: str) -> int:
        if text:
            self.line.leave()
        return self.stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def fitting(fields: Sequence[str], width: int) -> list[str]:
    """As many fields as there is room for: the first ones, and the last one, which is the speed.

    >>> fitting(["step: 3", "loss: 2.5", "memory: 1.00 GiB", "tokens/s: 2,048"], 41)
    ['step: 3', 'loss: 2.5', 'tokens/s: 2,048']
    """
    *shown, last = fields
    while len(shown) > 1 and len("  ".join([*shown, last])) > width:
        shown.pop()
    return [*shown, last]


class LiveLine:
    """The line. It stays where it is once the script prints something, and begins anew below."""

    def __init__(self) -> None:
        self.stream, self.text = sys.stdout, ""
        self.own = Shared(sys.stdout, self), Shared(sys.stderr, self)
        sys.stdout, sys.stderr = self.own

    def show(self, fields: Sequence[str]) -> None:
        """Cut to the width of the terminal: a second line would not be cleared."""
        width = get_terminal_size().columns - 1
        self.put("  ".join(fitting(fields, width))[:width])
        self.text = "  ".join(fields)

    def leave(self) -> None:
        """What is printed from now on is below the line, which is whole now."""
        if self.text:
            self.put(f"{self.text}\n")
            self.text = ""

    def put(self, text: str) -> None:
        self.stream.write(f"{CLEAR}{text}" if self.text else text)
        self.stream.flush()

    def close(self) -> None:
        """Give stdout and stderr back, unless somebody has replaced them since."""
        self.leave()
        out, error = self.own
        if sys.stdout is out:
            sys.stdout = out.stream
        if sys.stderr is error:
            sys.stderr = error.stream


def live_line() -> LiveLine | None:
    """None if stdout is no terminal."""
    return LiveLine() if sys.stdout.isatty() else None
