"""A small clock for tables: when each slot starts and ends, messages taking no time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from piper.names import BI, BW, B, F, Phase
from piper.strategies.schedules.table import Action, Table

UNIT: Mapping[Phase, int] = {F: 1, BI: 1, BW: 1, B: 2}
Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class Span:
    """What one rank did with its time."""

    start: int
    end: int
    busy: int

    @property
    def idle_inside(self) -> int:
        return self.end - self.start - self.busy


def spans(table: Table, cost: Mapping[Phase, int] = UNIT) -> list[Span]:
    there = set(table.actions)
    needs = {action: [a for a in inputs(action) if a in there] for action in there}
    return clock(table.rows, needs, lambda action: cost[action.phase])


def bubble(table: Table, cost: Mapping[Phase, int] = UNIT) -> int:
    """The step's time beyond the work of the busiest rank."""
    ranks = spans(table, cost)
    return max(rank.end for rank in ranks) - max(rank.busy for rank in ranks)


def inputs(action: Action) -> list[Action]:
    stage, phase, microbatch = action
    if phase is F:
        return [Action(stage - 1, F, microbatch)]
    if phase is BW:
        return [Action(stage, BI, microbatch)]
    return [Action(stage, F, microbatch), *(Action(stage + 1, p, microbatch) for p in (B, BI))]


def clock(
    rows: Sequence[Sequence[tuple[Item, ...]]],
    needs: Mapping[Item, Sequence[Item]],
    cost: Callable[[Item], int],
) -> list[Span]:
    """Every slot starts when its rank is free and all it needs is done; a pair takes both times."""
    ended: dict[Item, int] = {}
    result = [Span(0, 0, 0) for _ in rows]
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(n in ended for i in row[at[rank]] for n in needs[i]):
                slot, span = row[at[rank]], result[rank]
                start = max([span.end, *(ended[n] for item in slot for n in needs[item])])
                lasts = sum(map(cost, slot))
                ended |= dict.fromkeys(slot, start + lasts)
                begun = span.start if at[rank] else start
                result[rank] = Span(begun, start + lasts, span.busy + lasts)
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in rows], "the rows wait for each other"
    return result
