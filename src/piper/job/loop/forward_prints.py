"""What a forward prints while Piper runs it before the first step, on values that it made up."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Any

from piper.capture.source_lines import is_users, short_line
from piper.launcher.script_errors import PIPER

LOG = logging.getLogger("piper")
SHOWN = (
    "%s prints: before the first step, Piper runs the forward and the loss a few times on values "
    "and numbers of rows that it makes up (? is a value that it leaves open), and shows only the "
    "first of these lines; captured steps print nothing. For values in training, print what "
    "trainer.step or trainer.predict returns"
)
OPEN = re.compile(r"\bzuf\d+\b")  # torch's name of a number that a trace does not know
_over: set[str] = set()  # lines of code whose first output was shown


class Once:
    """Standard output, with the first line only of each `print` in a model."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.thread = whole, threading.get_ident()

    def write(self, text: str) -> int:
        line = printing_line(sys._getframe(1)) if threading.get_ident() == self.thread else ""
        if line in _over:
            return len(text)
        self.whole.write(OPEN.sub("?", text) if line else text)
        if line and text[-1:] == "\n":
            _over.add(line)
            LOG.warning(SHOWN, line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


@contextmanager
def prints_shown_once() -> Iterator[None]:
    with redirect_stdout(Once(sys.stdout)):
        yield


def printing_line(frame: FrameType | None) -> str:
    """The line of a model or a loss that prints. Empty if nothing of the user runs inside Piper."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(PIPER):
            return ""
        frame = frame.f_back
    return "" if frame is None else short_line(frame.f_code.co_filename, frame.f_lineno)
