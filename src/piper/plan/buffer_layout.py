"""Layouts of buffers: the messages of an all-gather, and values on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from piper.ir.values import ITEM_BYTES, Value
from piper.plan.instructions import Layout, Shape

ALIGNED = 64  # bytes: every message is aligned for any dtype


def offsets(messages: Sequence[Layout]) -> list[int]:
    """The offset of each message in bytes, and the total size.

    >>> offsets([("float32", (0,), 10), ("float32", (1,), 4)])
    [0, 64, 128]
    """
    sizes = [-(-padded * ITEM_BYTES[dtype] // ALIGNED) * ALIGNED for dtype, _, padded in messages]
    return [0, *accumulate(sizes)]


def wire_shapes(value: Value) -> tuple[Shape, ...]:
    return tuple([(spec.shape, spec.dtype) for spec in value.specs])
