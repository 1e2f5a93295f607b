"""What a device sends in a step: bytes on each stream, read off the plan."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import assert_never

from piper.ir.values import ITEM_BYTES
from piper.plan.instructions import (
    Add,
    Exchange,
    Free,
    Gather,
    Keep,
    Layout,
    Load,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    Shape,
    Total,
    Update,
)


def traffic(plan: Plan) -> dict[str, int]:
    """Bytes that leave the device, by stream; unknown sizes count nothing.

    Rows of experts count as if they were spread evenly. Of S bytes among n devices an all-reduce
    sends 2 (n-1)/n S, each half of it one (n-1)/n S.
    """
    found: Counter[str] = Counter()
    for one in plan.instructions:
        match one:
            case Send():
                found[one.stream] += sum(map(shape_bytes, one.shapes))
            case Reduce():
                found[one.stream] += (1 if one.scatter else 2) * shared(one.messages, one.group)
            case Gather():
                found[one.stream] += shared(one.messages, one.group)
            case Exchange():
                rows = sum(map(shape_bytes, one.shapes))
                found[one.stream] += rows * (len(one.group) - 1) // len(one.group)
            case Load() | Run() | Keep() | Add() | Recv() | Total() | Update() | Free():
                pass
            case _:
                assert_never(one)
    return dict(found)


def shared(messages: tuple[Layout, ...], group: tuple[int, ...]) -> int:
    """What a device sends so that everyone of the group has its part of the messages."""
    return sum(map(message_bytes, messages)) * (len(group) - 1) // len(group)


def message_bytes(message: Layout) -> int:
    dtype, _, padded = message
    return padded * ITEM_BYTES[dtype]


def shape_bytes(shape: Shape) -> int:
    sizes, dtype = shape
    return prod(size or 0 for size in sizes) * ITEM_BYTES[dtype]
