"""What a table prints."""

from strategies.tables import table

from piper.names import BI, BW, B, F
from piper.strategies.schedules.table import Action, draw, ranks_of


def test_an_action_prints_as_pytorch_writes_it() -> None:
    actions = [Action(0, F, 0), Action(1, B, 2), Action(2, BI, 1), Action(2, BW, 1)]

    assert [str(action) for action in actions] == ["0F0", "1B2", "2BI1", "2BW1"]


def test_a_rank_with_one_stage_is_drawn_without_it() -> None:
    assert draw(table("0F0 0B0", "1F0 1I0 1W0")) == "PP rank 0  F0 B0\nPP rank 1  F0 BI0 BW0"


def test_a_rank_with_several_stages_names_them_and_joins_what_overlaps() -> None:
    assert draw(table("0F0 (0F1;1B0)OVERLAP_F_B")) == "PP rank 0  0F0 0F1&1B0"


def test_ranks_line_up_from_ten_on() -> None:
    rows = draw(table(*(f"{rank}F0 {rank}B0" for rank in range(11)))).splitlines()

    assert (rows[0], rows[10]) == ("PP rank  0  F0 B0", "PP rank 10  F0 B0")


def test_a_table_knows_its_sizes() -> None:
    small = table("0F0 0F1 3F0", "1F0 2F0")

    assert (small.stages, small.microbatches) == (4, 2)
    assert ranks_of(small) == {0: 0, 1: 1, 2: 1, 3: 0}
