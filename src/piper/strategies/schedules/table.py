"""A pipeline schedule as a table: what each rank runs, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from piper.ir.by_device.schedule_rows import label
from piper.names import Phase


class Action(NamedTuple):
    """One pass of one stage on one microbatch.

    It is a named tuple for speed: checking a table is mostly looking up actions.

    >>> from piper.names import BI
    >>> print(Action(2, BI, 1))
    2BI1
    """

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return label(self.stage, self.phase, self.microbatch)


Slot = tuple[Action, ...]  # one action, or several that may overlap
Row = tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One row of slots per rank. All replicas of a rank run the same row."""

    rows: tuple[Row, ...]

    @property
    def actions(self) -> Iterator[Action]:
        return (action for row in self.rows for slot in row for action in slot)

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for action in self.actions), default=-1)

    @property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for action in self.actions), default=-1)

    def __str__(self) -> str:
        return draw(self)


def row_of(actions: Iterable[Action]) -> Row:
    """A row in which nothing overlaps."""
    return tuple((action,) for action in actions)


def ranks_of(table: Table) -> dict[int, int]:
    """The rank of every stage, by stage."""
    found = {a.stage: rank for rank, row in enumerate(table.rows) for slot in row for a in slot}
    return dict(sorted(found.items()))


def draw(table: Table) -> str:
    """One line per rank. Stages are shown if a rank has several; `&` joins overlapping actions.

    >>> from piper.names import B, F
    >>> print(draw(Table((row_of([Action(0, F, 0), Action(0, B, 0)]),))))
    PP rank 0  F0 B0
    >>> print(draw(Table((((Action(0, F, 1), Action(1, B, 0)),),))))
    PP rank 0  0F1&1B0
    """
    width = len(str(len(table.rows) - 1))
    lines = (f"PP rank {rank:>{width}}  {line(row)}" for rank, row in enumerate(table.rows))
    return "\n".join(lines)


def line(row: Row) -> str:
    one_stage = len({action.stage for slot in row for action in slot}) <= 1
    return " ".join("&".join(cell(action, one_stage) for action in slot) for slot in row)


def cell(action: Action, one_stage: bool) -> str:
    return label(None if one_stage else action.stage, action.phase, action.microbatch)
