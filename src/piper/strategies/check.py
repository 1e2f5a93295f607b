"""What every schedule must satisfy: one function per rule, which yields all problems it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from piper.errors import Problem, StrategyError
from piper.names import BI, BW, B, F, Phase
from piper.strategies.dataflow import rows_agree_with_the_dataflow
from piper.strategies.schedules.table import Action, Table, ranks_of

Rule = Callable[[Table], Iterator[Problem]]
COMPLETE = ({F, B}, {F, BI, BW})
SHOWN = 10  # problems in one message
FROM_0 = "; stages and microbatches count from 0"


def check(table: Table) -> None:
    """Raise `StrategyError` for a table that leaves work out, does it twice, or deadlocks.

    Each group of rules relies on the groups before it.
    """
    for rules in GROUPS:
        problems = list(islice((problem for rule in rules for problem in rule(table)), SHOWN))
        if problems:
            raise StrategyError("schedule", *problems)


def every_rank_has_work(table: Table) -> Iterator[Problem]:
    if not table.rows:
        yield Problem("the table has no rows", "write one row per rank, such as 0F0,0B0")
    for rank, row in enumerate(table.rows):
        if not any(row):
            yield Problem(f"rank {rank} runs nothing", "give it a stage, or leave it out")


def every_number_starts_at_zero(table: Table) -> Iterator[Problem]:
    below = (action for action in table.actions if action.stage < 0 or action.microbatch < 0)
    for action in dict.fromkeys(below):
        yield Problem(f"{action} has a negative number", "number stages and microbatches from 0")


def every_stage_is_there(table: Table) -> Iterator[Problem]:
    for stage in missing(ranks_of(table), table.stages):
        fix = "add its passes, or number the stages from 0 without gaps"
        yield Problem(f"no rank runs stage {stage}", fix)


def every_stage_has_one_rank(table: Table) -> Iterator[Problem]:
    found: dict[int, dict[int, list[Action]]] = {}
    for rank, row in enumerate(table.rows):
        for slot in row:
            for action in slot:
                found.setdefault(action.stage, {}).setdefault(rank, []).append(action)
    for stage, by_rank in sorted(found.items()):
        home = max(by_rank, key=lambda rank: len(by_rank[rank]))
        for rank, actions in by_rank.items():
            if rank != home:
                what = f"stage {stage} is on rank {home}, but {listed(actions)} on rank {rank}"
                yield Problem(what, f"move {listed(actions)} to rank {home}")


def every_action_runs_once(table: Table) -> Iterator[Problem]:
    for action, times in Counter(table.actions).items():
        if times > 1:
            yield Problem(f"{action} runs {times} times", f"keep one {action}")


def every_stage_sees_every_microbatch(table: Table) -> Iterator[Problem]:
    count = table.microbatches
    for stage, seen in by_stage(table).items():
        for absent in missing(seen, count):
            what = f"stage {stage} never runs microbatch {absent}"
            yield Problem(
                what, f"add {stage}F{absent} and {stage}B{absent}{FROM_0 * (absent == 0)}"
            )


def every_microbatch_goes_forward_and_back(table: Table) -> Iterator[Problem]:
    for stage, seen in by_stage(table).items():
        for microbatch, phases in seen.items():
            if phases not in COMPLETE:
                yield incomplete(stage, microbatch, phases)


def incomplete(stage: int, microbatch: int, found: set[Phase]) -> Problem:
    f, b, i, w = (Action(stage, phase, microbatch) for phase in (F, B, BI, BW))
    halves = f"{b}, or {i} and {w}"
    if F not in found:
        return Problem(f"{f} is missing", f"add {f} before its backward")
    if found == {F}:
        return Problem(f"the backward of {f} is missing", f"add {halves}")
    if B in found:
        return Problem(f"{f} has both a whole and a split backward", f"keep {halves}")
    absent, fix = (i, f"add {i} before {w}") if BW in found else (w, f"add {w} after {i}")
    return Problem(f"{absent} is missing", f"{fix}, or write {b} for both")


def every_pass_follows_what_it_needs(table: Table) -> Iterator[Problem]:
    """On one rank. Both may be in one slot, where the dataflow orders them."""
    slots = {a: i for row in table.rows for i, slot in enumerate(row) for a in slot}
    for action, slot in slots.items():
        needed = Action(action.stage, BI if action.phase is BW else F, action.microbatch)
        if slot < slots[needed]:
            rank = ranks_of(table)[action.stage]
            what = f"rank {rank} runs {action} before {needed}, which it needs"
            yield Problem(what, f"move {needed} before {action}")


GROUPS: tuple[tuple[Rule, ...], ...] = (
    (every_rank_has_work, every_number_starts_at_zero),
    (every_stage_is_there, every_stage_has_one_rank, every_action_runs_once),
    (every_stage_sees_every_microbatch, every_microbatch_goes_forward_and_back),
    (every_pass_follows_what_it_needs,),
    (rows_agree_with_the_dataflow,),
)


def by_stage(table: Table) -> dict[int, dict[int, set[Phase]]]:
    """The passes found for each stage and microbatch."""
    found: dict[int, dict[int, set[Phase]]] = {}
    for action in table.actions:
        found.setdefault(action.stage, {}).setdefault(action.microbatch, set()).add(action.phase)
    return dict(sorted(found.items()))


def missing(found: Iterable[int], count: int) -> list[int]:
    """The first numbers below `count` that are not in `found`; fast even if `count` is huge."""
    present = set(found)
    return list(islice((number for number in range(count) if number not in present), SHOWN))


def listed(actions: list[Action]) -> str:
    shown = ", ".join(map(str, actions[:3]))
    return f"{shown} and {len(actions) - 3} more" if len(actions) > 3 else shown
