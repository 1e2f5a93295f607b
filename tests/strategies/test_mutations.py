"""Any schedule with one mistake in it is refused."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies.tables import every_schedule

from piper.errors import StrategyError
from piper.names import F
from piper.strategies.check import check
from piper.strategies.schedules.table import Action, Row, Table

EXAMPLES = settings(max_examples=120, deadline=None, derandomize=True)


@st.composite
def some_schedules(draw: st.DrawFn, least_ranks: int = 1) -> Table:
    pp, microbatches = draw(st.integers(least_ranks, 4)), draw(st.integers(1, 9))
    found = [t for t in all_schedules(pp, microbatches) if len(t.rows) >= least_ranks]
    return draw(st.sampled_from(found))


@cache
def all_schedules(pp: int, microbatches: int) -> tuple[Table, ...]:
    return tuple(every_schedule(pp, microbatches))


def without(row: Row, action: Action) -> Row:
    left = (tuple(a for a in slot if a != action) for slot in row)
    return tuple(slot for slot in left if slot)


def replaced(table: Table, rank: int, row: Row) -> Table:
    return Table((*table.rows[:rank], row, *table.rows[rank + 1 :]))


def pick(data: st.DataObject, table: Table) -> tuple[int, Action]:
    places = [(r, a) for r, row in enumerate(table.rows) for slot in row for a in slot]
    return data.draw(st.sampled_from(places))


def inserted(data: st.DataObject, row: Row, action: Action) -> Row:
    at = data.draw(st.integers(0, len(row)))
    return (*row[:at], (action,), *row[at:])


@EXAMPLES
@given(some_schedules(), st.data())
def test_a_dropped_action_is_missed(schedule: Table, data: st.DataObject) -> None:
    rank, action = pick(data, schedule)

    mutated = replaced(schedule, rank, without(schedule.rows[rank], action))

    with pytest.raises(StrategyError):
        check(mutated)


@EXAMPLES
@given(some_schedules(), st.data())
def test_a_doubled_action_is_noticed(schedule: Table, data: st.DataObject) -> None:
    _, action = pick(data, schedule)
    rank = data.draw(st.integers(0, len(schedule.rows) - 1))

    mutated = replaced(schedule, rank, inserted(data, schedule.rows[rank], action))

    with pytest.raises(StrategyError):
        check(mutated)


@EXAMPLES
@given(some_schedules(least_ranks=2), st.data())
def test_an_action_on_a_foreign_rank_is_noticed(schedule: Table, data: st.DataObject) -> None:
    home, action = pick(data, schedule)
    away = data.draw(st.sampled_from([r for r in range(len(schedule.rows)) if r != home]))

    moved = replaced(schedule, home, without(schedule.rows[home], action))
    mutated = replaced(moved, away, inserted(data, schedule.rows[away], action))

    with pytest.raises(StrategyError):
        check(mutated)


@EXAMPLES
@given(some_schedules(), st.data())
def test_a_backward_before_its_forward_is_noticed(schedule: Table, data: st.DataObject) -> None:
    rank, forward = pick(data, schedule)
    assume(forward.phase is F)
    mine = (forward.stage, forward.microbatch)
    others = [a for slot in schedule.rows[rank] for a in slot if a.phase is not F]
    backward = next(a for a in others if (a.stage, a.microbatch) == mine)
    swap = {forward: backward, backward: forward}

    swapped = (tuple(swap.get(a, a) for a in slot) for slot in schedule.rows[rank])
    mutated = replaced(schedule, rank, tuple(swapped))

    with pytest.raises(StrategyError):
        check(mutated)
