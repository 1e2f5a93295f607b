"""Sizes of messages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from piper.ir.values import ITEM_BYTES
from piper.names import Device

Layout = tuple[str, tuple[int, ...], int]  # of a flat message: dtype, tensors, padded elements
Shape = tuple[tuple[int | None, ...], str]  # sizes (None: depends on data) and dtype


def is_dynamic(shape: Shape) -> bool:
    """Whether a size depends on data.

    >>> is_dynamic(((None, 4), "float32"))
    True
    """
    return None in shape[0]


def shape_bytes(shape: Shape) -> int:
    """Unknown sizes count as zero."""
    sizes, dtype = shape
    return prod(size or 0 for size in sizes) * ITEM_BYTES[dtype]


def message_bytes(message: Layout) -> int:
    dtype, _, padded = message
    return padded * ITEM_BYTES[dtype]


def ring_bytes(messages: Sequence[Layout], group: Sequence[Device]) -> int:
    """What a device sends in a ring: (n-1)/n of the bytes, among n devices.

    That is a reduce-scatter or an all-gather. An all-reduce does both.
    """
    return sum(map(message_bytes, messages)) * (len(group) - 1) // len(group)
