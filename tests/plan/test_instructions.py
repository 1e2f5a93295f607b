"""Instructions and plans as text."""

import pytest

from piper.names import COMPUTE
from piper.plan.instructions import (
    Add,
    Exchange,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Recv,
    Reduce,
    Run,
    Send,
    Total,
    Update,
    line,
)  # fmt: skip

SHAPES = (((2, None), "float32"),)
MESSAGES = (("float32", (0,), 8),)


@pytest.mark.parametrize(
    ("instruction", "printed"),
    [
        (Load("x@1", "batch", 0, 1, 2), "load    x@1"),
        (Run("F", "P", "F", ("w", "x"), ("h", "s"), (3,)), "run     F (w, x) -> h, s  after 3"),
        (Keep("sum g", "g"), "keep    sum g += g"),
        (Add("sum g", "g", (4, 5)), "add     sum g += g  after 4, 5"),
        (Send("send h", "h", SHAPES, 1, "pp"), "send    h to 1 on pp"),
        (Recv("send h", "h>1", SHAPES, 0, "pp"), "recv    h>1 from 0 on pp"),
        (
            Reduce("reduce g", "g", "R:w", MESSAGES, (0, 2), False, "dp", (4,)),
            "reduce  g -> R:w among 0, 2 on dp  after 4",
        ),
        (
            Reduce("reduce g", "g", "S:w", MESSAGES, (0, 2), True, "dp"),
            "scatter g -> S:w among 0, 2 on dp",
        ),
        (
            Gather("gather w", "w", "W:w", MESSAGES, SHAPES, (0, 2), 1, "dp"),
            "gather  w -> W:w [1] among 0, 2 on dp",
        ),
        (
            Exchange(
                "to F", "counted", ("r", "c"), ("r~", "c~", "route"), SHAPES, (0, 2), "ep", (4,)
            ),
            "counted r, c -> r~, c~, route among 0, 2 on ep  after 4",
        ),
        (
            Exchange("from F", "back", ("r~", "route"), ("r",), SHAPES, (0, 2), "ep"),
            "back    r~, route -> r among 0, 2 on ep",
        ),
        (Total("totals", (("loss@0", 0),), ("g",), (0, 1)), "total   loss@0, g"),
        (Update("U", "w", "g", True, (7,)), "update  w by g  after 7"),
        (Free(("a", "b"), (2,)), "free    a, b  after 2"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_an_instruction_prints_on_one_line(instruction: Instruction, printed: str) -> None:
    assert line(instruction) == printed


def test_only_transfers_collectives_and_totals_run_beside_compute() -> None:
    beside = [
        Send("s", "h", (), 1, "pp"),
        Recv("s", "h", (), 1, "pp"),
        Reduce("r", "g", "S", (), (0, 1), True, "dp"),
        Gather("g", "w", "W", (), (), (0, 1), 0, "side"),
        Exchange("e", "out", (), (), (), (0, 1), "ep"),
        Total("t", (), (), ()),
    ]
    compute = [Run("F", "R", "F", (), ()), Keep("a", "b"), Add("a", "b"), Update("U", "w", "g")]

    streams = [one.stream for one in (*beside, *compute, Free(()), Load("x", "batch", 0, 0, 1))]

    assert streams == ["pp", "pp", "dp", "side", "ep", "loss_norm", *[COMPUTE] * 6]
