"""What a strategy needs of a device's memory, and what would need less, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.view.reports.footprint import size_text
from piper.view.reports.simulation_text import columns


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A strategy, or a change of it."""

    change: str
    peak: int  # bytes of the fullest device
    fits: bool
    seconds: float  # predicted, of a step
    note: str = ""


def memory_table(rows: Sequence[MemoryRow]) -> str:
    """One line for each. The time is relative to that of the first.

    >>> print(memory_table([MemoryRow("as it is", 2**31, False, 1.0),
    ...                     MemoryRow("remat=True", 2**30, True, 1.25)]))
        strategy    peak memory  fits    step
        as it is        2.0 GiB    no  1.00 x
        remat=True      1.0 GiB   yes  1.25 x
    """
    lines = columns([["strategy", "peak memory", "fits", "step"], *cells(rows)])
    return "\n".join(f"    {line}" for line in lines)


def cells(rows: Sequence[MemoryRow]) -> Iterator[list[str]]:
    first = rows[0].seconds or 1.0
    for row in rows:
        fits = "yes" if row.fits else "no"
        yield [
            f"{row.change} {row.note}".rstrip(),
            size_text(row.peak),
            fits,
            f"{row.seconds / first:.2f} x",
        ]
