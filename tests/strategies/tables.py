"""Tables for tests: short to write, and a list of all schedules at many sizes."""

from __future__ import annotations

from collections.abc import Iterator

from piper.strategies import schedules
from piper.strategies.pytorch_csv import parse_csv
from piper.strategies.schedules.table import Table

RANKS = range(1, 9)
MICROBATCHES = (1, 2, 3, 8, 10, 17)


def table(*rows: str) -> Table:
    """A table from one text per rank, actions separated by spaces."""
    return parse_csv("\n".join(",".join(row.split()) for row in rows))


def sizes() -> Iterator[tuple[int, int]]:
    return ((pp, microbatches) for pp in RANKS for microbatches in MICROBATCHES)


def equal_rounds(pp: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // pp) == 0


def every_schedule(pp: int, microbatches: int) -> Iterator[Table]:
    """Each schedule that can be built for these sizes."""
    yield schedules.gpipe(pp, microbatches)
    yield schedules.zbv(pp, microbatches)
    if microbatches >= pp:
        yield schedules.one_f_one_b(pp, microbatches)
        yield schedules.zb_h1(pp, microbatches)
    if microbatches >= 2 * pp:
        yield schedules.dualpipev(pp, microbatches)
    if pp % 2 == 0 and microbatches >= pp:
        yield schedules.dualpipe(pp, microbatches)
    if equal_rounds(pp, microbatches):
        for virtual in (2, 3, 4):
            yield schedules.interleaved_one_f_one_b(pp, microbatches, virtual)
            yield schedules.interleaved_zb(pp, microbatches, virtual)
