"""PyTorch's schedule text, in and out."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies.tables import table

from piper.errors import StrategyError
from piper.names import B, F, Phase
from piper.strategies.pytorch_csv import ACCEPTED, parse_csv, print_csv
from piper.strategies.schedules.table import Action, Table, row_of

ACTIONS = st.builds(Action, st.integers(0, 40), st.sampled_from(Phase), st.integers(0, 2000))
SLOTS = st.lists(ACTIONS, min_size=1, max_size=2).map(tuple)
ROWS = st.lists(SLOTS, min_size=1, max_size=5).map(tuple)
TABLES = st.lists(ROWS, max_size=5).map(lambda rows: Table(tuple(rows)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TABLES)
def test_what_is_printed_is_read_back(any_table: Table) -> None:
    assert parse_csv(print_csv(any_table)) == any_table


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.sampled_from('0123FBIW(;)OVERLAP_\n\r,"\0 ')) | st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(StrategyError):
        parse_csv(text)


def test_what_no_spreadsheet_writes_is_refused() -> None:
    with pytest.raises(StrategyError) as refused:
        parse_csv("0" * 200_000)

    assert str(refused.value) == (
        "schedule text: this is not CSV: field larger than field limit (131072)\n"
        "  fix: write one row of actions per rank"
    )


def test_one_row_per_rank_and_one_cell_per_slot() -> None:
    written = print_csv(table("0F0 (0F1;3B0)OVERLAP_F_B", "1F0 2F0"))

    assert written == "0F0,(0F1;3B0)OVERLAP_F_B\n1F0,2F0\n"


def test_idle_cells_spaces_and_line_ends_mean_nothing() -> None:
    assert parse_csv("\ufeff, 0F0 ,,0B0,\r\n\r\n , \n") == Table(
        (row_of([Action(0, F, 0), Action(0, B, 0)]),)
    )


def test_a_rank_without_work_keeps_its_row() -> None:
    assert [len(row) for row in parse_csv("0F0\n\n1F0\n").rows] == [1, 0, 1]


@pytest.mark.parametrize(
    "derived",
    ["0UNSHARD", "0RESHARD", "1REDUCE_GRAD", "0SEND_F1", "1RECV_F1", "1SEND_B0", "0RECV_B0"],
)
def test_communication_is_left_out(derived: str) -> None:
    assert parse_csv(f"{derived},0F0,{derived}") == table("0F0")


@pytest.mark.parametrize(
    "bad",
    [
        "0X0", "F0", "0F", "0f0", "0F0x", "-1F0", "0F0 0B0", "0BX0", "0SEND_X1",
        "()OVERLAP_F_B", "(0F0;)OVERLAP_F_B", "(0F0;1B0)", "(0F0;1B0)F",
        "(0F0;0SEND_F0)OVERLAP_F_B", "0F1234567890",
    ],
)  # fmt: skip
def test_a_cell_that_is_no_action_is_refused_with_its_place(bad: str) -> None:
    with pytest.raises(StrategyError) as refused:
        parse_csv(f"0F0,0B0\n1F0,{bad}\n")

    assert str(refused.value) == (
        f"schedule text: row 2 (rank 1), column 2: {bad!r} is not an action\n"
        "  fix: write stage, pass and microbatch, as in 0F0 (forward), 0B0 (backward), 0BI0 and "
        "0BW0 (its halves, or 0I0 and 0W0) or (0F7;3B2)OVERLAP_F_B, or leave the cell empty"
    )


def test_halves_may_be_written_as_everywhere_else() -> None:
    ours, theirs = "0F0,0BI0,0BW0,(0F1;0B2)OVERLAP_F_B", "0F0,0I0,0W0,(0F1;0B2)OVERLAP_F_B"

    assert parse_csv(ours) == parse_csv(theirs)
    assert print_csv(parse_csv(ours)) == f"{theirs}\n"


def test_every_bad_cell_is_named() -> None:
    with pytest.raises(StrategyError) as refused:
        parse_csv("0X0,0F0\n1F0,1Y1")

    assert str(refused.value) == (
        "schedule text: row 1 (rank 0), column 1: '0X0' is not an action, nor is '1Y1'\n"
        f"  fix: {ACCEPTED}"
    )
    with pytest.raises(StrategyError, match="'F0' is not an action, nor are 'F1', 'B0', 'B1' and"):
        parse_csv("F0,F1,B0,B1\nF0,B0,F1,B1")


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_separators_are_named_once(mark: str) -> None:
    with pytest.raises(StrategyError) as refused:
        parse_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n".replace(",", mark))

    assert str(refused.value) == (
        "schedule text: cells are not separated by commas\n"
        "  fix: write 0F0,0F1: one comma after each"
    )


def test_a_header_and_numbers_of_ranks_are_named_once() -> None:
    with pytest.raises(StrategyError) as refused:
        parse_csv("rank,step1,step2\n0,0F0,0B0\n1,1F0,1B0\n")

    assert str(refused.value) == (
        "schedule text: row 1 is a header: 'rank,step1,step2'\n"
        "  fix: leave it out: every row has the actions of one rank, and the first is rank 0\n"
        "schedule text: rows begin with numbers, which are not actions\n"
        "  fix: leave them out: rows are in the order of ranks, and have only actions"
    )
