"""Which tables are schedules: the smallest counterexample of each rule, and its whole message."""

from __future__ import annotations

import pytest
from draws import one_of
from strategies.tables import every_schedule, sizes, table

from piper.errors import StrategyError
from piper.names import F
from piper.strategies.check import GROUPS, Rule, check
from piper.strategies.schedules import one_f_one_b
from piper.strategies.schedules.table import Action, Table, row_of

REFUSED = {
    "every_rank_has_work": [
        (Table(()), "the table has no rows", "write one row per rank, such as 0F0,0B0"),
        (
            table("0F0 0B0", "", "1F0 1B0"),
            "rank 1 runs nothing",
            "give it a stage, or leave it out",
        ),
    ],
    "every_number_starts_at_zero": [
        (
            Table((row_of([Action(0, F, -1), Action(0, F, -1)]),)),
            "0F-1 has a negative number",
            "number stages and microbatches from 0",
        ),
    ],
    "every_stage_is_there": [
        (
            table("0F0 0B0", "2F0 2B0"),
            "no rank runs stage 1",
            "add its passes, or number the stages from 0 without gaps",
        ),
    ],
    "every_stage_has_one_rank": [
        (
            table("0F0 0F1 0B0", "1F0 1F1 0B1 1B0 1B1"),
            "stage 0 is on rank 0, but 0B1 on rank 1",
            "move 0B1 to rank 0",
        ),
        (
            table("0F0 0F1 0F2 0F3 0F4", "0B0 0B1 0B2 0B3"),
            "stage 0 is on rank 0, but 0B0, 0B1, 0B2 and 1 more on rank 1",
            "move 0B0, 0B1, 0B2 and 1 more to rank 0",
        ),
    ],
    "every_action_runs_once": [
        (table("0F0 0F0 0B0"), "0F0 runs 2 times", "keep one 0F0"),
    ],
    "every_stage_sees_every_microbatch": [
        (
            table("0F0 0F1 0B0 0B1", "1F0 1B0"),
            "stage 1 never runs microbatch 1",
            "add 1F1 and 1B1",
        ),
    ],
    "every_microbatch_goes_forward_and_back": [
        (table("0B0"), "0F0 is missing", "add 0F0 before its backward"),
        (table("0F0"), "the backward of 0F0 is missing", "add 0B0, or 0BI0 and 0BW0"),
        (
            table("0F0 0B0 0W0"),
            "0F0 has both a whole and a split backward",
            "keep 0B0, or 0BI0 and 0BW0",
        ),
        (table("0F0 0I0"), "0BW0 is missing", "add 0BW0 after 0BI0, or write 0B0 for both"),
        (table("0F0 0W0"), "0BI0 is missing", "add 0BI0 before 0BW0, or write 0B0 for both"),
    ],
    "every_pass_follows_what_it_needs": [
        (
            table("0B0 0F0"),
            "rank 0 runs 0B0 before 0F0, which it needs",
            "move 0F0 before 0B0",
        ),
        (
            table("0F0 0W0 0I0"),
            "rank 0 runs 0BW0 before 0BI0, which it needs",
            "move 0BI0 before 0BW0",
        ),
    ],
    "rows_agree_with_the_dataflow": [
        (
            table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "these passes wait for each other\n"
            "      0B0 -> 0F1   order of rank 0\n"
            "      0F1 -> 1F1   data flow\n"
            "      1F1 -> 1B0   order of rank 1\n"
            "      1B0 -> 0B0   data flow",
            "run 0F1 before 0B0 on rank 0, or 1B0 before 1F1 on rank 1",
        ),
        (
            table("2F0 0F0 0B0 2B0", "1F0 1I0 1W0"),
            "these passes wait for each other\n"
            "      2F0 -> 0F0   order of rank 0\n"
            "      0F0 -> 1F0   data flow\n"
            "      1F0 -> 2F0   data flow",
            "run 0F0 before 2F0 on rank 0",
        ),
    ],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("rule", "bad", "what", "fix"), CASES, ids=[case[2] for case in CASES])
def test_a_table_that_breaks_a_rule_is_refused(rule: str, bad: Table, what: str, fix: str) -> None:
    with pytest.raises(StrategyError) as refused:
        check(bad)

    assert str(refused.value) == f"schedule: {what}\n  fix: {fix}"
    assert refused.value.problems == tuple(next(r for r in rules() if r.__name__ == rule)(bad))


def test_every_rule_has_its_smallest_counterexample() -> None:
    assert list(REFUSED) == [rule.__name__ for rule in rules()]


def rules() -> list[Rule]:
    return [rule for group in GROUPS for rule in group]


def test_all_problems_of_a_kind_are_reported_at_once() -> None:
    with pytest.raises(StrategyError) as refused:
        check(table("0F0 0F1", "1F0 1B0 1I1 1W1"))

    assert str(refused.value) == (
        "schedule: the backward of 0F0 is missing\n"
        "  fix: add 0B0, or 0BI0 and 0BW0\n"
        "schedule: the backward of 0F1 is missing\n"
        "  fix: add 0B1, or 0BI1 and 0BW1\n"
        "schedule: 1F1 is missing\n"
        "  fix: add 1F1 before its backward"
    )


def test_numbers_begin_at_0() -> None:
    with pytest.raises(
        StrategyError, match="add 0F0 and 0B0; stages and microbatches count from 0"
    ):
        check(table("0F1 0B1 0F2 0B2"))


def test_a_mistyped_number_costs_no_time() -> None:
    with pytest.raises(StrategyError) as refused:
        check(table("0F0 0B0 0F999999999 0B999999999"))

    assert str(refused.value.problems[0]) == (
        "stage 0 never runs microbatch 1\n  fix: add 0F1 and 0B1"
    )


def test_what_needs_each_other_may_share_a_slot() -> None:
    check(table("(0B0;0F0)OVERLAP_F_B", "1F0 (1W0;1I0)OVERLAP_F_B"))


def test_what_shares_a_slot_does_not_wait_for_it() -> None:
    check(table("0F0 (0B0;0F1)OVERLAP_F_B 0B1", "1F0 1F1 1B0 1B1"))


def test_some_backwards_may_be_split_and_others_not() -> None:
    check(table("0F0 0F1 0B0 0I1 0W1"))


@one_of(3)
@pytest.mark.parametrize(("pp", "microbatches"), sizes())
def test_every_schedule_passes(pp: int, microbatches: int) -> None:
    for schedule in every_schedule(pp, microbatches):
        check(schedule)


def test_a_ring_is_drawn_without_the_steps_inside_a_row() -> None:
    *rows, last = one_f_one_b(pp=4, microbatches=64).rows
    greedy = (*last[0:80:2], *last[1:80:2], *last[80:])  # 40 forwards before the first backward

    with pytest.raises(StrategyError) as refused:
        check(Table((*rows, greedy)))

    assert str(refused.value) == (
        "schedule: these passes wait for each other\n"
        "      2B0 -> 2F2   order of rank 2\n"
        "      2F2 -> 3F2   data flow\n"
        "      3F2 -> 3B0   order of rank 3\n"
        "      3B0 -> 2B0   data flow\n"
        "  fix: run 2F2 before 2B0 on rank 2, or 3B0 before 3F2 on rank 3"
    )
