"""Bytes that a device sends in a step, computed from its plan."""

from __future__ import annotations

from collections import Counter

from piper.plan.instructions import (
    Exchange,
    Gather,
    Plan,
    Redistribute,
    Reduce,
    Total,
    is_message,
)
from piper.plan.instructions.messages import SHIFTS
from piper.plan.instructions.sizes import message_bytes, shape_bytes

Collective = Reduce | Gather | Exchange | Redistribute | Total


def traffic(plan: Plan) -> dict[str, int]:
    """Bytes that leave the device, by stream."""
    found: Counter[str] = Counter()
    for one in plan.instructions:
        if is_message(one) and one.sent:
            found[one.stream] += one.sent
    return dict(found)


def split_by_node(one: Collective, nodes: int) -> tuple[float, float]:
    """Bytes that a member of a collective over so many nodes sends inside its node, and out of it.

    Reductions and gathers run as rings, which use all links that leave a node. Tokens go directly
    to their devices.
    """
    times, size = volume(one)
    if is_shift(one):  # the device that sends to another node decides how long it takes
        return (size, 0.0) if nodes == 1 else (0.0, size)
    count = len(one.group)
    local = count / nodes
    if is_direct(one):
        return size * (local - 1) / count, size * (count - local) / count
    inside = times * size * (count - 1) / count if local > 1 else 0.0
    return inside, times * size * (nodes - 1) / nodes / local


def is_direct(one: Collective) -> bool:
    """Whether every device sends to others directly, and passes nothing on."""
    all_to_all = isinstance(one, Redistribute) and one.step == "all-to-all"
    return all_to_all or isinstance(one, Exchange) or is_shift(one)


def is_shift(one: Collective) -> bool:
    return isinstance(one, Redistribute) and one.step in SHIFTS


def volume(one: Collective) -> tuple[int, float]:
    """How often the bytes of a collective go around the ring, and their number."""
    if isinstance(one, Total):
        return 2, 0.0
    if isinstance(one, Exchange):
        return 1, float(sum(map(shape_bytes, one.shapes)))
    if isinstance(one, Redistribute):
        joined = len(one.group) if one.step == "all-gather" else 1
        return 2 if one.step == "all-reduce" else 1, float(shape_bytes(one.shape) * joined)
    both = 2 if isinstance(one, Reduce) and not one.scatter else 1
    return both, float(sum(map(message_bytes, one.messages)))
