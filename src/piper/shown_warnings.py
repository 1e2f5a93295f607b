"""Warnings that no handler of the program shows: on standard error, as Python does, with a name."""

import logging
import sys
from contextlib import suppress

LOG = logging.getLogger("piper")


class LastResort(logging.Handler):
    """Where neither the program nor a command of Piper has a handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [*logging.root.handlers, *(one for one in LOG.handlers if one is not self)]
        if not others and sys.stderr is not None:
            with suppress(OSError, ValueError):  # it is closed
                print(self.format(record), file=sys.stderr)


def show_warnings() -> None:
    """Begin to. Later calls do nothing."""
    if not any(isinstance(one, LastResort) for one in LOG.handlers):
        handler = LastResort(logging.WARNING)
        handler.setFormatter(logging.Formatter("piper: %(message)s"))
        LOG.addHandler(handler)
