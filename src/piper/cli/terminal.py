"""What commands print: fitted to a terminal; plain and uncut in a file or a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer
from rich.console import Console

from piper.cli.usage import usage
from piper.costs.device_lists import device_numbers
from piper.errors import InputError
from piper.ir.by_device.schedule_rows import Rows, length
from piper.view.schedule_grid import Window, grid, legend, summary

UNIT = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b|[num]?s\b|%)")  # between a number and its unit
IN_ITEM = re.compile(r"(?<!;) ")  # not between the items of a list: "a b; c d"
TOGETHER = "\N{NO-BREAK SPACE}"
MOST = 24  # lines of a list in a terminal
Steps = Annotated[
    str | None,
    typer.Option(metavar="FIRST:COUNT", help="draw only these time steps, as in 0:40"),
]
Devices = Annotated[
    str | None, typer.Option(metavar="LIST", help="show only these devices, as in 0-3,8")
]


@usage()
def window_of(steps: str | None, devices: str | None, output: Path | None = None) -> Window:
    """What the options ask for, in the terminal that there is, or in a file."""
    console = Console()
    fits = console.is_terminal and output is None
    return Window(
        console.width if fits else None,
        steps_of(steps) if steps else None,
        frozenset(device_numbers(devices, "--devices")) if devices else None,
        fits and not console.no_color,
    )


def steps_of(text: str) -> tuple[int, int]:
    """
    >>> steps_of("8:4"), steps_of("40")
    ((8, 4), (0, 40))
    """
    first, colon, count = text.partition(":")
    numbers = (first, count) if colon else ("0", text)
    if not all(one.isascii() and one.isdecimal() and len(one) < 10 for one in numbers):
        fix = "write FIRST:COUNT, for example --steps 0:40"
        raise InputError.of("--steps", f"{text!r} names no time steps", fix)
    return int(numbers[0]), int(numbers[1])


def show_rows(rows: Rows, window: Window, machine: bool = False) -> None:
    """A schedule over time, with what its letters mean. `machine`: idle time is shown elsewhere."""
    refuse_beyond(rows, window)
    console = Console(soft_wrap=True)
    console.print(grid(rows, window) or "nothing to show", highlight=False, markup=window.painted)
    show_text(summary(rows, machine), window)
    print(fitted(legend(rows), window.width, whole=IN_ITEM))


@usage()
def refuse_beyond(rows: Rows, window: Window) -> None:
    """Time steps that a schedule does not have."""
    first, count = window.steps or (0, 1)
    last = length(rows)
    if last and (first >= last or not count):
        what = f"the schedule has time steps 0 to {last - 1}"
        raise InputError.of("--steps", what, f"write FIRST:COUNT, for example --steps 0:{last}")


def show_text(text: str, window: Window) -> None:
    """Lines that are too long are continued below, with an indent."""
    for line in text.splitlines():
        print(fitted(line, window.width))


def show_lines(lines: Iterable[str], window: Window) -> None:
    """The first lines of a list that may be very long. `--devices` shows the others."""
    found = list(lines)
    shown = found if window.width is None or window.devices else found[:MOST]
    show_text("\n".join(shown), window)
    if len(found) > len(shown):
        print(f"... {len(found) - len(shown)} more: --devices LIST shows those that you name")


def fitted(line: str, width: int | None, whole: re.Pattern[str] = UNIT) -> str:
    """A line that is too long, continued below, but not at the spaces that `whole` matches.

    >>> print(fitted("  device 0  peak 4.6 KiB (parameters 800 B)", 23))
      device 0  peak
          4.6 KiB
          (parameters
          800 B)
    >>> print(fitted("F0 forward; -- still running; . idle", 30, IN_ITEM))
    F0 forward; -- still running;
        . idle
    """
    if width is None or len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    text = whole.sub(TOGETHER, line.strip())
    return "\n".join(
        wrap(text, max(width, 20), initial_indent=indent, subsequent_indent=indent + "    ",
             break_long_words=False, break_on_hyphens=False)
    ).replace(TOGETHER, " ")  # fmt: skip
