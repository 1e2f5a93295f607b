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
