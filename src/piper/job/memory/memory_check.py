"""Whether a compiled strategy fits in the memory of a device, and what would make it fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

from piper.directives import Remat, Strategy
from piper.errors import InputError, PiperError, Problem
from piper.job.compile.compiler import Compiled
from piper.job.compile.pricing import price
from piper.job.memory.memory_limit import MemoryLimit, fullest
from piper.strategies.smaller import smaller
from piper.view.reports.footprint import size_text
from piper.view.reports.memory_table import MemoryRow, memory_table

NEAREST = 3  # rows of the table if nothing fits
LOG = logging.getLogger("piper")
Compile = Callable[[Strategy], Compiled]


def refuse_too_large(
    compiled: Compiled, strategy: Strategy, limit: MemoryLimit, compile: Compile
) -> None:
    """An error if it needs more than the user allows, a warning if more than the GPU has.

    `compile` is for other strategies, of which a table says what they would need.
    """
    device, most = fullest(limit.peaks(compiled))
    if most <= limit.bytes:
        return
    now = row_of("as it is", compiled, limit)
    rows = [now, *(row for row in alternatives(strategy, limit, compile) if row.peak < now.peak)]
    what = (
        f"device {device} needs {size_text(most)}, and has {size_text(limit.bytes)}\n"
        f"{memory_table(worth_showing(rows))}"
    )
    problem = Problem(what, fix_of(rows))
    if limit.is_given:
        raise InputError("memory", problem)
    LOG.warning("memory: %s", problem)


def worth_showing(rows: list[MemoryRow]) -> list[MemoryRow]:
    """All rows; or, if none fits, what there is and the few that come nearest."""
    if any(row.fits for row in rows):
        return rows
    nearest = sorted(rows[1:], key=lambda row: (row.peak, row.seconds))
    distinct = {row.peak: row for row in reversed(nearest)}
    return [rows[0], *sorted(distinct.values(), key=lambda row: row.peak)[:NEAREST]]


def alternatives(strategy: Strategy, limit: MemoryLimit, compile: Compile) -> Iterator[MemoryRow]:
    """Changes of the strategy that can be compiled."""
    for change, other in smaller(strategy):
        with suppress(PiperError):  # such as a batch that cannot be cut so often
            compiled = compile(other)
            yield row_of(change, compiled, limit, chosen_text(other, compiled))


def row_of(change: str, compiled: Compiled, limit: MemoryLimit, note: str = "") -> MemoryRow:
    _, most = fullest(limit.peaks(compiled))
    return MemoryRow(change, most, most <= limit.bytes, price(compiled).seconds, note)


def chosen_text(strategy: Strategy, compiled: Compiled) -> str:
    """How many regions an automatic choice recomputes."""
    if not any(isinstance(one, Remat) and one.is_auto for one in strategy):
        return ""
    regions = [one for one in compiled.dag.model.regions if one.has_backward]
    again = [one for one in regions if one.recomputes and not one.recomputes.auto]
    return f"({len(again)} of {len(regions)} regions)"


def fix_of(rows: list[MemoryRow]) -> str:
    """The fastest change that fits."""
    fits = [row for row in rows if row.fits]
    if not fits:
        return "use more devices or stages, a smaller batch, or a smaller model"
    best = min(fits, key=lambda row: row.seconds)
    return f"write {best.change} in the builder of the strategy"
