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
    """After some seconds, say so on standard error, and what Piper logs from then on.

    Until then, warnings, if the script has no handler of its own for them.
    """
    handler, warnings, level = logging.StreamHandler(), logging.StreamHandler(), LOG.level
    for one in (handler, warnings):
        one.setFormatter(logging.Formatter("piper: %(message)s"))
    warnings.setLevel(logging.WARNING)
    warnings.addFilter(lambda _: not logging.root.handlers)
    LOG.addHandler(warnings)

    def begin() -> None:
        LOG.removeHandler(warnings)
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
        LOG.removeHandler(warnings)
        LOG.setLevel(level)
