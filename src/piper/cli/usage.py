"""Wrong usage: a command ends with exit code 2, as for options that it does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from piper.costs.devices import DEVICES, DeviceKind, device_kind
from piper.errors import PiperError, Problem, StrategyError, did_you_mean, nearest

WRONG_USAGE = 2
NUMBER = re.compile(r"\d+(\.\d+)?")


@contextmanager
def usage() -> Iterator[None]:
    """Inside, an error is about what was typed, and not about a script or a file."""
    try:
        yield
    except PiperError as error:
        error.exit_code = WRONG_USAGE
        raise


def gibibytes(text: str) -> float:
    """A number of GiB, which has no unit.

    >>> gibibytes("80")
    80.0
    """
    try:
        found = float(text)
    except ValueError:
        number = NUMBER.match(text)
        fix = f"write {number[0]}" if number else "write 80, for example"
        raise typer.BadParameter(f"{text!r} is not a number of GiB: {fix}") from None
    if not 0 < found < float("inf"):
        raise typer.BadParameter(f"{text!r} is no amount of memory: write 80, for example")
    return found


def count_of_processes(given: str | int) -> int:
    """The value of `-n`, or its default. To the parser, `-np 2` is `-n p`.

    >>> count_of_processes("2")
    2
    """
    text = str(given)
    if text.isascii() and text.isdecimal() and int(text):
        return int(text)
    other = "; -np is an option of mpirun" if text.startswith("p") else ""
    raise typer.BadParameter(
        f"{text!r} is not a number of processes: write -n 2, for example{other}"
    )


@usage()
def named_device(name: str) -> DeviceKind:
    """A data sheet. A misspelt name gets the one that was probably meant, of the same family.

    A B200 is another GPU than an H200.
    """
    try:
        return device_kind(name)
    except StrategyError as error:
        what, fix = error.problems[0].what, error.problems[0].fix
        family = [known for known in DEVICES if known[:1] == name.lower()[:1]]
        meant = did_you_mean(nearest(name.lower(), family))
        raise StrategyError.of(error.where, what, fix + meant) from None


@usage()
def refuse_two_costs(device: str | None, costs: str | None) -> None:
    if device is not None or costs is not None:
        problem = Problem("--profile measures this machine", "leave out --device and --costs")
        raise StrategyError("simulate", problem)


@usage()
def refuse_one_step(*files: Path | None) -> None:
    if any(files):
        problem = Problem("--view and --chrome show one step", "leave out --set, or leave them out")
        raise StrategyError("simulate", problem)


@usage()
def refuse_plot(file: Path | None) -> None:
    if file is not None:
        fix = "add --set, or write the page of the step with --view FILE.html"
        raise StrategyError.of("simulate", f"{file} would be a plot of a sweep", fix)
