"""How rows lie in a dimension with several elements of each: row by row, or one of each in turn.

`h.view(-1, n)` of `[rows, time, n]` has them row by row, and `h.repeat(2, 1)` in turn. What cuts or
counts them the other way takes elements of other rows: `h.view(-1, n).view(time, -1, n)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate
from operator import mul
from typing import Any

from piper.capture.trace.row_calls.both_calls import Both

VIEWS = frozenset({"view", "reshape", "flatten", "unflatten"})
COPIES = frozenset({"cat", "concat", "concatenate", "vstack", "repeat", "tile"})
CUTS = frozenset({"getitem", "narrow", "chunk", "split", "tensor_split"})


class Order(Enum):
    ROW_BY_ROW = auto()
    IN_TURN = auto()


@dataclass(frozen=True, slots=True)
class Place:
    """The one dimension of rows of a tensor: its size, and the elements before and through it."""

    size: int
    outside: int
    inside: int


@dataclass
class RowOrder:
    known: dict[Any, Order] = field(default_factory=dict)  # by the call that gave a tensor

    def is_torn(self, place: int, both: Both) -> bool:
        """Whether a call takes elements of other rows. Notes how they lie in its results."""
        if not both.all.inputs or both.all.in_loss:
            return False
        before = place_of(both.own.inputs[0][1], both.all.inputs[0][1])
        source = self.known.get(both.all.inputs[0][0])
        for k, sizes in enumerate(zip(both.own.sizes, both.all.sizes, strict=True)):
            after = place_of(*sizes)
            if after is None:
                continue
            if before is not None and is_torn(both, source, before, after):
                return True
            if before is not None and both.all.name in VIEWS:
                found = seen(source, before, after)
            else:
                found = self.order(both, before, after)
            self.known |= (
                {} if found is None or after.size == both.rows.all else {(place, k): found}
            )
        return False

    def order(self, both: Both, before: Place | None, after: Place) -> Order | None:
        """Of a result that is no view."""
        plain = both.all.inputs[0][0] not in self.known
        longer = plain and before is not None and before.size < after.size
        if longer and both.all.name == "repeat_interleave":
            return Order.ROW_BY_ROW
        if longer and both.all.name in COPIES:
            return Order.IN_TURN
        pairs = zip(both.own.inputs, both.all.inputs, strict=True)
        alike = (
            own[0]
            for own, every in pairs
            if (p := place_of(own[1], every[1])) and p.size == after.size
        )
        return next((self.known[one] for one in alike if one in self.known), None)


def place_of(own: Any, every: Any) -> Place | None:
    """None: it has no such dimension, or several."""
    if own is None or every is None or None in every[1] or len(own[1]) != len(every[1]):
        return None
    dims = [k for k, (a, b) in enumerate(zip(own[1], every[1], strict=True)) if a != b]
    if len(dims) != 1:
        return None
    products = [1, *accumulate(every[1], mul)]
    return Place(every[1][dims[0]], products[dims[0]], products[dims[0] + 1])


def is_torn(both: Both, source: Order | None, before: Place, after: Place) -> bool:
    if both.all.name in VIEWS:
        return is_torn_view(both, source, before, after)
    cuts = both.all.name in CUTS and source is Order.ROW_BY_ROW
    return cuts and is_cut(both, before, after)


def is_torn_view(both: Both, source: Order | None, before: Place, after: Place) -> bool:
    sizes = both.all.inputs[0][1][1]
    first, last = before.outside == after.outside, before.inside == after.inside
    if after.size >= before.size:  # others are joined
        whole = {after.outside, after.inside} <= {1, *accumulate(sizes, mul)}
        return not (first or last or whole)
    if before.size == both.rows.all:  # groups of rows
        return not first
    if source is None or first == last:
        return False
    return not (first if source is Order.ROW_BY_ROW else last)


def seen(source: Order | None, before: Place, after: Place) -> Order | None:
    """The order in a view."""
    first, last = before.outside == after.outside, before.inside == after.inside
    if after.size <= before.size or (first and last):
        return source
    if first and source is not Order.IN_TURN:
        return Order.ROW_BY_ROW
    return Order.IN_TURN if last and source is not Order.ROW_BY_ROW else None


def is_cut(both: Both, before: Place, after: Place) -> bool:
    """Whether it takes a part of rows that lie row by row, other than one element of each."""
    if after.size >= before.size or len(both.all.inputs) > 1:
        return False
    return before.size // after.size not in both.all.numbers
