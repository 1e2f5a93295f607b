"""Without garbage collection for a while. A leaf: every layer may import it."""

import gc
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

    Otherwise the next collection would look at all of it as if it were new.
    """
    with collector_off():
        yield
        if not gc.get_freeze_count():  # else the program froze objects, which must stay so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
