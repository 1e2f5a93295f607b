"""When each pass of a schedule runs, in time steps, if communication takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from heapq import heappop, heappush

from piper.directives import Order, Place, Strategy
from piper.errors import StrategyError
from piper.ir.by_device.schedule_rows import STEPS, Cell, Rows, dag_rows, label
from piper.ir.dag import Dag
from piper.names import Device
from piper.strategies.dataflow import need, whole
from piper.strategies.export import to_table
from piper.strategies.schedules.table import Action, Row, Slot, Table, ranks_of

Starts = dict[Action, int]


def strategy_rows(strategy: Strategy) -> Rows:
    """The rows of a strategy whose orders are those of a pipeline."""
    table = to_table(strategy)
    starts, ranks = start_times(table), ranks_of(table)
    several = len(ranks) > len(table.rows)
    devices: list[set[Device]] = [set() for _ in table.rows]
    for one in strategy:
        stage = dict(one.filter.items).get("PP") if isinstance(one, Place) else None
        if isinstance(one, Place) and isinstance(stage, int) and stage in ranks:
            devices[ranks[stage]].update(one.devices)
    named = zip(devices, table.rows, strict=True)
    return {tuple(sorted(some)): list(cells(row, starts, several)) for some, row in named}


def compiled_rows(strategy: Strategy, dag: Dag) -> Rows:
    """The passes of the DAG. Where orders interleave pieces of passes, their slots instead."""
    pieces = dag.shardings or any(region.ways > 1 for region in dag.model.regions)
    if pieces and any(isinstance(one, Order) for one in strategy):
        with suppress(StrategyError):  # not a pipeline schedule
            return strategy_rows(strategy)
    return dag_rows(dag)


def cells(row: Row, starts: Starts, several: bool) -> Iterator[Cell]:
    """Passes of one slot that follow each other are one cell."""
    for slot in row:
        end, joined = -1, list[Action]()
        for action in sorted(slot, key=lambda action: starts[action]):
            if joined and starts[action] > end:
                yield cell(slot, joined, starts, several)
                joined = []
            joined.append(action)
            end = starts[action] + STEPS[action.phase]
        yield cell(slot, joined, starts, several)


def cell(slot: Slot, joined: list[Action], starts: Starts, several: bool) -> Cell:
    """Labelled in the order of the slot."""
    start, written = starts[joined[0]], [action for action in slot if action in joined]
    names = tuple(label(a.stage if several else None, a.phase, a.microbatch) for a in written)
    end = start + sum(STEPS[action.phase] for action in joined)
    return Cell(start, end, names, tuple(action.phase for action in written))


def start_times(table: Table) -> Starts:
    """Run all ranks of a table that `check` accepts, each pass as soon as it can.

    >>> from piper.strategies.schedules import one_f_one_b
    >>> [str(a) for a, t in start_times(one_f_one_b(pp=2, microbatches=3)).items() if t > 4]
    ['1B1', '0F2', '0B1', '1F2', '1B2', '0B2']
    """
    last, ranks = table.stages - 1, ranks_of(table)
    rows = [iter(row) for row in table.rows]
    left, free = [0 for _ in rows], [0 for _ in rows]
    starts: Starts = {}
    ends: dict[Action | None, int] = {None: 0}  # what waits for nothing can start at once
    waiting: dict[Action, tuple[int, Action]] = {}
    ready: list[tuple[int, int, int, Action]] = []  # from when on, rank, place in its slot

    def begin_next_slot(rank: int) -> None:
        slot = next(rows[rank], ())
        left[rank] = len(slot)
        for place, action in enumerate(slot):
            needed = need(action, last)
            if needed in ends:
                heappush(ready, (max(free[rank], ends[needed]), rank, place, action))
            elif needed is not None:
                waiting[needed] = place, action

    for rank in range(len(rows)):
        begin_next_slot(rank)
    while ready:
        time, rank, place, action = heappop(ready)
        if time < free[rank]:  # another pass of its slot came first
            heappush(ready, (free[rank], rank, place, action))
            continue
        result, starts[action] = whole(action), time
        free[rank] = ends[result] = time + STEPS[action.phase]
        if result in waiting:
            place, later = waiting[result]
            there = ranks[later.stage]
            heappush(ready, (max(free[rank], free[there]), there, place, later))
        left[rank] -= 1
        if not left[rank]:
            begin_next_slot(rank)
    return starts
