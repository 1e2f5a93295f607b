"""Without garbage collection for a while. A leaf: every layer may import it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """For work that makes many objects and hardly a cycle, or that a collection would spoil."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """For imports: what they make stays, so it counts as old at once.

    Otherwise the next collection would look at all of it as if it were new. To count frozen objects
    takes long if there are many.
    """
    with collector_off():
        before = len(sys.modules)
        yield
        new = len(sys.modules) > before
        if new and not gc.get_freeze_count():  # else the program froze objects, which stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
