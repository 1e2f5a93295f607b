"""PyTorch's CSV format of schedules: one row of comma-separated actions per rank.

    0F0,0F1,(0F2;3B0)OVERLAP_F_B,0I1,0W1

`F` is a forward, `B` a whole backward, `I` and `W` its two halves. Everywhere else in Piper, these
are `BI` and `BW`, which can be written here, too. PyTorch also writes communication into such rows.
Piper derives communication itself and skips those cells.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from piper.errors import Problem, StrategyError, some_names
from piper.names import BI, BW, B, F, Phase, with_article
from piper.strategies.schedules.table import Action, Slot, Table

LETTERS = {F: "F", B: "B", BI: "I", BW: "W"}  # one letter per pass, as PyTorch writes it
PHASES: dict[str, Phase] = {letter: phase for phase, letter in LETTERS.items()}
PHASES |= {"BI": BI, "BW": BW}
ACTION = re.compile(r"([0-9]{1,9})(F|B[IW]?|[IW])([0-9]{1,9})")
DERIVED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")
WORD = re.compile(r"(?!(F|B[IW]?|[IW])[0-9])[A-Za-z].*")
OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
ACCEPTED = (
    "write stage, pass and microbatch, as in 0F0 (forward), 0B0 (backward), 0BI0 and 0BW0 (its "
    "halves, or 0I0 and 0W0) or (0F7;3B2)OVERLAP_F_B, or leave the cell empty"
)


def print_csv(table: Table) -> str:
    """The table as PyTorch reads it.

    >>> print(print_csv(parse_csv("0F0,,0B0,0REDUCE_GRAD")), end="")
    0F0,0B0
    """
    return "".join(",".join(map(slot_text, row)) + "\n" for row in table.rows)


def slot_text(slot: Slot) -> str:
    if len(slot) == 1:
        return action_text(slot[0])
    return f"({';'.join(map(action_text, slot))})OVERLAP_F_B"


def action_text(action: Action) -> str:
    """
    >>> action_text(Action(2, BI, 1))
    '2I1'
    """
    return f"{action.stage}{LETTERS[action.phase]}{action.microbatch}"


def parse_csv(text: str) -> Table:
    """The table in a text, not yet checked: that is for `check`."""
    if not isinstance(text, str):
        problem = Problem(f"it is {with_article(type(text).__name__)}", "give open(path).read()")
        raise StrategyError("schedule text", problem)
    rows = read_cells(text)
    slots = [[parse_slot(text.strip()) for text in cells] for cells in rows]
    problems = list(not_a_table(rows, slots)) or list(unreadable(rows, slots))
    if problems:
        raise StrategyError("schedule text", *problems)
    return Table(tuple(tuple(slot for slot in row if slot) for row in slots))


def read_cells(text: str) -> list[list[str]]:
    """The cells of each row, without a byte order mark and empty rows at the end."""
    try:
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        problem = Problem(f"this is not CSV: {error}", "write one row of actions per rank")
        raise StrategyError("schedule text", problem) from None
    while rows and not any(map(str.strip, rows[-1])):
        rows.pop()
    return rows


def not_a_table(rows: list[list[str]], slots: list[list[Slot | None]]) -> Iterator[Problem]:
    """What is wrong with whole rows, said once: other separators, a header, a column of ranks."""
    if any(is_row(line[0].replace(mark, ",")) for line in rows[:1] if line for mark in ";\t|"):
        yield Problem("cells are not separated by commas", "write 0F0,0F1: one comma after each")
        return
    if len(rows) > 1 and is_header(rows[0], slots[0]):
        fix = "leave it out: every row has the actions of one rank, and the first is rank 0"
        yield Problem(f"row 1 is a header: {','.join(rows[0])!r}", fix)
    firsts = [row[0].strip() for row in rows if row]
    if any(text.isdecimal() for text in firsts):
        fix = "leave them out: rows are in the order of ranks, and have only actions"
        yield Problem("rows begin with numbers, which are not actions", fix)


def is_row(text: str) -> bool:
    """Whether this is a row of several actions."""
    cells = [parse_slot(cell.strip()) for cell in text.split(",")]
    return len(cells) > 1 and None not in cells


def is_header(cells: list[str], slots: list[Slot | None]) -> bool:
    """Whether no cell is an action, or looks like one with a mistake in it.

    >>> is_header(["rank", "step1"], [None, None]), is_header(["0X0", "F0"], [None, None])
    (True, False)
    """
    return None in slots and all(map(WORD.fullmatch, filter(None, map(str.strip, cells))))


def unreadable(rows: list[list[str]], slots: list[list[Slot | None]]) -> Iterator[Problem]:
    """The first cell that is no action, with its place, and what the others have."""
    bad = [
        (f"row {number + 1} (rank {number}), column {column + 1}", text.strip())
        for number, cells in enumerate(rows)
        for column, text in enumerate(cells)
        if slots[number][column] is None
    ]
    if bad:
        (place, text), *others = bad
        yield not_an_action(place, text, [repr(other) for _, other in others])


def not_an_action(place: str, text: str, others: Sequence[str] = ()) -> Problem:
    """
    >>> print(not_an_action("row 1 (rank 0), column 1", "runs/schedule.csv"))
    row 1 (rank 0), column 1: 'runs/schedule.csv' is the name of a file
      fix: give its text, Path('runs/schedule.csv').read_text()
    """
    if Path(text).suffix == ".csv":
        return Problem(
            f"{place}: {text!r} is the name of a file", f"give its text, Path({text!r}).read_text()"
        )
    nor = f", nor {'is' if len(others) == 1 else 'are'} {some_names(others)}" if others else ""
    return Problem(f"{place}: {text!r} is not an action{nor}", ACCEPTED)


def parse_slot(text: str) -> Slot | None:
    """The actions of a cell: empty if it is idle or communication, None if it is unreadable."""
    if not text or DERIVED.fullmatch(text):
        return ()
    if found := OVERLAP.fullmatch(text):
        actions = [parse_action(part.strip()) for part in found[1].split(";")]
        return None if None in actions else tuple(action for action in actions if action)
    action = parse_action(text)
    return action and (action,)


def parse_action(text: str) -> Action | None:
    if found := ACTION.fullmatch(text):
        return Action(int(found[1]), PHASES[found[2]], int(found[3]))
    return None
