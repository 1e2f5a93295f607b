"""What a command is doing, if it takes long."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

PATIENCE = 5.0  # seconds without a word
LOG = logging.getLogger("piper")


@contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """After some seconds, say so on standard error, and what Piper logs from then on."""
    handler, level = logging.StreamHandler(), LOG.level
    handler.setFormatter(logging.Formatter("piper: %(message)s"))

    def begin() -> None:
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
        LOG.info("%s is taking more than %.0f seconds", what, PATIENCE)

    timer = Timer(PATIENCE, begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        LOG.removeHandler(handler)
        LOG.setLevel(level)
