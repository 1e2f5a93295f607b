"""Where the messages of a gather lie in the buffer that it fills."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from piper.ir.values import ITEM_BYTES
from piper.plan.instructions import Layout

ALIGNED = 64  # bytes: every message starts where any type may start


def offsets(messages: Sequence[Layout]) -> list[int]:
    """The first byte of each message, and the bytes of all of them.

    >>> offsets([("float32", (0,), 10), ("float32", (1,), 4)])
    [0, 64, 128]
    """
    sizes = [-(-padded * ITEM_BYTES[dtype] // ALIGNED) * ALIGNED for dtype, _, padded in messages]
    return [0, *accumulate(sizes)]
