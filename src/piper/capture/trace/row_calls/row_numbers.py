"""Numbers of rows in a loss that a model computes itself: `mse + norm / len(x)`.

Rows do not meet there, and one graph shows only the number that its microbatch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piper.capture.trace.row_calls.both_calls import Both, is_integer
from piper.capture.trace.row_calls.recorded_calls import RecordedCall, RowCounts

WITH_ROWS = frozenset({"empty", "empty_strided"})  # as batches come into a trace
WITHOUT_VALUES = frozenset({"size", "dim", "numel", "len", "new_zeros", "zeros", "zeros_like"})


def counting_line(
    own: Sequence[RecordedCall], every: Sequence[RecordedCall], rows: RowCounts
) -> str | None:
    """Of the first call for what has no rows, with a number that follows theirs, or of the first
    that puts together what is alike for all rows: `scale.expand(len(x), 4).square().sum()`."""
    alike = set[Any]()
    for place, pair in enumerate(zip(own, every, strict=True)):
        both = Both(*pair, rows)
        with_rows = [source for source, sizes in both.inputs if sizes]
        is_alike = alike.issuperset(with_rows)
        if any(both.results):
            given = both.all.name in WITH_ROWS
            alike.update((place, k) for k in range(len(both.results)) if is_alike and not given)
        elif counts(both) or (with_rows and is_alike and gives_numbers(both)):
            return both.all.line
    return None


def counts(both: Both) -> bool:
    return both.own.numbers != both.all.numbers and gives_numbers(both)


def gives_numbers(both: Both) -> bool:
    """Floating-point numbers, of a forward."""
    floats = [one for one in both.all.sizes if one is not None and not is_integer(one)]
    known = both.all.name not in WITHOUT_VALUES and not both.all.backward
    return bool(floats) and known
