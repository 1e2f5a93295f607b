"""Rows that are read or written at places that values decide: `h[h.argmax(1)]`, `index_add`.

How many places there are follows the number of rows. Where values decide that, too, as in
`mask.nonzero()`, they are mostly the tokens of an expert, which come back to where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piper.capture.trace.row_calls.both_calls import Both, grown, is_integer

READS = frozenset({"getitem", "gather", "index_select", "take_along_dim", "take"})
WRITES = frozenset({
    "setitem", "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy",
    "index_reduce",
})  # fmt: skip
WITH_INDEX = frozenset({"getitem", "setitem", "index_put"})  # of the first dimension, first


def chooses_rows(both: Both) -> bool:
    """Whether integers with a value for each row say which rows are read or written."""
    if both.all.name not in READS | WRITES or len(both.all.inputs) < 2 or not both.row_dims:
        return False
    index = both.all.inputs[1][1]
    if index is None or not is_integer(index) or "bool" in index[0] or None in index[1]:
        return False
    if not grown(both.own.inputs[1][1], index):
        return False
    if both.all.name == "take":  # of all elements, one after the other
        return True
    return is_first(both) if both.all.name in WITH_INDEX else both.is_along_rows


def is_first(both: Both) -> bool:
    """Whether it is an index of the first dimension, and rows are along that."""
    first: Sequence[Any] = both.all.given[1:2]
    rank = len(both.all.inputs[0][1][1])
    return list(first) == [both.all.inputs[1][0]] and -rank in both.row_dims
