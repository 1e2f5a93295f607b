"""Whether all ranks of a schedule can finish; if not, which actions wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from piper.errors import Problem
from piper.names import BI, BW, B, F
from piper.strategies.schedules.table import Action, Table, ranks_of


@dataclass(frozen=True, slots=True)
class Wait:
    """`after` cannot start until `before` is done."""

    before: Action
    after: Action
    rank: int | None = None  # the rank whose row orders them; None if data flows between them

    def __str__(self) -> str:
        why = "data flow" if self.rank is None else f"order of rank {self.rank}"
        return f"{self.before} -> {self.after}   {why}"


def rows_agree_with_the_dataflow(table: Table) -> Iterator[Problem]:
    """A rule of `check`, for tables that have every action once, after its inputs on its rank."""
    stuck = run(table)
    if any(stuck):
        yield drawn(cycle(table, stuck))


def run(table: Table) -> list[list[Action]]:
    """Run all ranks, without a clock. Return the slot at which each rank is stuck, if any.

    Every action waits for at most one other, and is visited again only when that one is done.
    """
    last, ranks = table.stages - 1, ranks_of(table)
    rows = [iter(row) for row in table.rows]
    stuck: list[list[Action]] = [[] for _ in rows]
    done: set[Action] = set()
    waiting: dict[Action, Action] = {}
    ready: list[Action] = []

    def begin_next_slot(rank: int) -> None:
        stuck[rank] = list(next(rows[rank], ()))
        for action in stuck[rank]:
            needed = need(action, last)
            if needed is None or needed in done:
                ready.append(action)
            else:
                waiting[needed] = action

    for rank in range(len(rows)):
        begin_next_slot(rank)
    while ready:
        action = ready.pop()
        result = whole(action)
        done.add(result)
        if result in waiting:
            ready.append(waiting[result])
        rank = ranks[action.stage]
        stuck[rank].remove(action)
        if not stuck[rank]:
            begin_next_slot(rank)
    return stuck


def need(action: Action, last: int) -> Action | None:
    """The action of another rank that an action waits for, if any. A BI counts as its B.

    A backward waits for that of the next stage, which has waited for this stage's forward.
    """
    stage, phase, microbatch = action
    if phase is F:
        return Action(stage - 1, F, microbatch) if stage else None
    if phase is BW:
        return None  # its BI is on its own rank
    return Action(stage, F, microbatch) if stage == last else Action(stage + 1, B, microbatch)


def whole(action: Action) -> Action:
    return Action(action.stage, B, action.microbatch) if action.phase is BI else action


def cycle(table: Table, stuck: list[list[Action]]) -> list[Wait]:
    """Walk from one stuck action to the one it waits for until the walk meets itself."""
    ranks, last = ranks_of(table), table.stages - 1
    written = {whole(action): action for action in table.actions}
    action = next(slot[0] for slot in stuck if slot)
    walk: dict[Action, list[Wait]] = {}
    while action not in walk:
        needed = need(action, last)
        assert needed is not None
        before = written[needed]
        rank = ranks[before.stage]
        head = before if before in stuck[rank] else stuck[rank][0]
        through_row = [Wait(head, before, rank)] if head != before else []
        walk[action] = [*through_row, Wait(before, action)]
        action = head
    steps = list(walk.values())[list(walk).index(action) :]
    return list(chain.from_iterable(reversed(steps)))


def drawn(waits: list[Wait]) -> Problem:
    lines = "".join(f"\n      {wait}" for wait in waits)
    turns = [f"{w.after} before {w.before} on rank {w.rank}" for w in waits if w.rank is not None]
    return Problem(f"these passes wait for each other{lines}", f"run {', or '.join(turns[:2])}")
