"""The layout of the messages of an all-gather in its buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from piper.ir.values import ITEM_BYTES
from piper.plan.instructions import Layout

ALIGNED = 64  # bytes: every message is aligned for any dtype


def offsets(messages: Sequence[Layout]) -> list[int]:
    """The offset of each message in bytes, and the total size.

    >>> offsets([("float32", (0,), 10), ("float32", (1,), 4)])
    [0, 64, 128]
    """
    sizes = [-(-padded * ITEM_BYTES[dtype] // ALIGNED) * ALIGNED for dtype, _, padded in messages]
    return [0, *accumulate(sizes)]
