"""Writes to rows at places that do not follow the number of rows: `h[5] = 0`, `h[:3].mul_(2)`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from piper.capture.trace.row_calls.both_calls import Both, all_multiples, is_integer, sizes_of_rows

ALONG_DIMENSION = frozenset({
    "index_fill", "index_add", "index_copy", "index_reduce", "scatter", "scatter_add",
    "scatter_reduce", "select_scatter", "slice_scatter",
})  # fmt: skip


@dataclass
class RowWrites:
    """`parts`: views of rows at constant places, by the call that gave them."""

    parts: set[Any] = field(default_factory=set)

    def is_at_fixed_rows(self, both: Both) -> bool:
        """Whether a call writes to them."""
        if not both.all.inputs:
            return False
        source = both.all.inputs[0][0]
        if both.all.writes and source in self.parts:
            return True
        if both.all.name == "setitem":
            return has_all_rows(both, 0) and bool(both.all.written) and not follows(both)
        if both.all.name == "index_put":
            return both.row_dims == [-rank(both)] and is_constant_index(both)
        along = both.all.name in ALONG_DIMENSION and has_all_rows(both, 0) and both.is_along_rows
        return along and not any(follows_rows(both, k) for k in range(1, len(both.all.inputs)))

    def note(self, place: int, both: Both) -> None:
        """A view of some rows, as `h[:3]`."""
        if both.all.inputs and has_all_rows(both, 0) and not any(both.results):
            self.parts.update((place, k) for k in range(len(both.results)))


def has_all_rows(both: Both, k: int) -> bool:
    pairs = sizes_of_rows(both.own.inputs[k][1], both.all.inputs[k][1])
    return bool(pairs) and all_multiples(pairs, both.rows.own, both.rows.all)


def follows_rows(both: Both, k: int) -> bool:
    """Whether an index or a source has all rows, or as many as values decide."""
    described = both.all.inputs[k][1]
    return has_all_rows(both, k) or (described is not None and None in described[1])


def follows(both: Both) -> bool:
    """Whether the part that is written to has all rows, or follows from values."""
    own, every = both.own.written, both.all.written
    if own is None or every is None or None in every[1]:
        return True
    pairs = sizes_of_rows(own, every)
    return bool(pairs) and all_multiples(pairs, both.rows.own, both.rows.all)


def rank(both: Both) -> int:
    return len(both.all.inputs[0][1][1])


def is_constant_index(both: Both) -> bool:
    """Whether as many rows are written for each number of them."""
    first = both.all.inputs[1][1] if len(both.all.inputs) > 1 and both.all.given[1] else None
    if first is None or not is_integer(first) or "bool" in first[0]:
        return False
    return not follows_rows(both, 1)
