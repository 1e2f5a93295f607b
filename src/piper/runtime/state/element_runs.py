"""Where the elements of a part lie in its tensor, and what two parts of a tensor have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from piper.runtime.state.element_order import ElementOrder


class ElementRun(NamedTuple):
    """Elements that are contiguous both in the tensor and in a part of it."""

    start: int  # in the tensor
    length: int
    offset: int  # in the part


class Overlap(NamedTuple):
    """Elements that two parts have in common, contiguous in both."""

    source: int  # where they start in the first part
    target: int  # and in the second
    length: int


def element_runs(
    order: ElementOrder, shape: Sequence[int], first: int, length: int
) -> list[ElementRun]:
    """The runs of `length` elements from number `first` on, in this order; by their start.

    >>> element_runs(ElementOrder(1, 1, 2), (2, 4), 0, 4)
    [ElementRun(start=0, length=2, offset=0), ElementRun(start=4, length=2, offset=2)]
    """
    if order.is_natural:
        return [ElementRun(first, length, 0)] if length else []
    size = shape[order.dim] // (order.blocks * order.ways) * prod(shape[order.dim + 1 :])
    in_a_piece = prod(shape[: order.dim]) * order.blocks  # runs of one of the `ways`
    found = []
    position = first
    while position < first + length:
        number, inside = divmod(position, size)
        way, within = divmod(number, in_a_piece)
        count = min(size - inside, first + length - position)
        start = (within * order.ways + way) * size + inside
        found.append(ElementRun(start, count, position - first))
        position += count
    return sorted(found)


def overlaps(sources: Sequence[ElementRun], targets: Sequence[ElementRun]) -> Iterator[Overlap]:
    """What two parts have in common. Both lists are sorted by where runs start."""
    s = t = 0
    while s < len(sources) and t < len(targets):
        one, other = sources[s], targets[t]
        low = max(one.start, other.start)
        high = min(one.start + one.length, other.start + other.length)
        if low < high:
            source, target = one.offset + low - one.start, other.offset + low - other.start
            yield Overlap(source, target, high - low)
        if one.start + one.length <= other.start + other.length:
            s += 1
        else:
            t += 1


def without(runs: Sequence[ElementRun], taken: Sequence[ElementRun]) -> list[ElementRun]:
    """What remains of a part. Both lists are sorted by where runs start.

    >>> without([ElementRun(0, 10, 0)], [ElementRun(2, 3, 0)])
    [ElementRun(start=0, length=2, offset=0), ElementRun(start=5, length=5, offset=5)]
    """
    found, t = [], 0
    for start, length, offset in runs:
        at, end = start, start + length
        while t < len(taken) and taken[t].start + taken[t].length <= at:
            t += 1
        k = t
        while k < len(taken) and taken[k].start < end:
            if taken[k].start > at:
                found.append(ElementRun(at, taken[k].start - at, offset + at - start))
            at = max(at, taken[k].start + taken[k].length)
            k += 1
        if at < end:
            found.append(ElementRun(at, end - at, offset + at - start))
    return found
