"""piper schedule: print the order of any builder."""

from __future__ import annotations

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.files import OUTPUT, printed_to
from piper.cli.help import Command
from piper.cli.target import STRATEGIES
from piper.cli.terminal import Devices, Steps, show_rows, window_of
from piper.cli.usage import usage
from piper.directives import Strategy
from piper.errors import Problem, StrategyError
from piper.strategies import BUILDERS, to_csv
from piper.strategies.other_names import no_schedule
from piper.strategies.timing import strategy_rows
from piper.view.schedule_grid import Window
from piper.view.schedule_svg import svg


class Format(StrEnum):
    """Output formats."""

    GRID = "grid"
    CSV = "csv"
    JSON = "json"
    SVG = "svg"


def add_to(app: typer.Typer) -> None:
    app.command("schedule", cls=Command)(schedule)


@usage()
def built_in(name: str) -> str:
    """Checked before options that are missing: files, which `show` draws, need none of them."""
    if name in BUILDERS:
        return name
    if Path(name).suffix in (".py", *STRATEGIES):
        fix = f"write: piper show {name}"
        raise StrategyError.of("schedule", f"{name} is a file, and not a built-in schedule", fix)
    raise StrategyError("schedule", no_schedule(name, BUILDERS))


def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=", ".join(BUILDERS), callback=built_in, is_eager=True),
    ],
    pp: Annotated[int, typer.Option(help="pipeline ranks", min=1)],
    microbatches: Annotated[int, typer.Option(help="microbatches per step", min=1)],
    virtual: Annotated[int | None, typer.Option(help="stages per rank (interleaved)")] = None,
    dp: Annotated[int, typer.Option(help="replicas of every stage", min=1)] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO level of the replicas", min=0, max=3)] = 0,
    mesh: Annotated[
        str | None, typer.Option(help='order of the axes: "pp,dp" puts replicas side by side')
    ] = None,
    format: Annotated[Format, typer.Option(help="output format; csv is PyTorch's")] = Format.GRID,
    steps: Steps = None,
    devices: Devices = None,
    output: Annotated[
        Path | None,
        typer.Option(*OUTPUT, help="write it to this file, as --format or its ending says"),
    ] = None,
) -> None:
    """Draw a built-in schedule over time, or print it in a form that other commands read.

    Example: piper schedule zbv --pp 4 --microbatches 8
    """
    window = window_of(steps, devices, output)
    build = BUILDERS[name]
    options = {"pp": pp, "microbatches": microbatches, "dp": dp, "zero": zero, "mesh": mesh}
    if virtual is not None:
        refuse_unused(name, "virtual", inspect.signature(build).parameters)
        options["virtual"] = virtual
    strategy = build(**options)
    with printed_to(output):
        show_as(format_of(format, output), strategy, window)


def format_of(given: Format, output: Path | None) -> Format:
    """The one that is given, or that of the file's ending."""
    ending = output.suffix[1:] if output else ""
    return Format(ending) if given is Format.GRID and ending in list(Format) else given


def show_as(format: Format, strategy: Strategy, window: Window) -> None:
    match format:
        case Format.GRID:
            show_rows(strategy_rows(strategy), window)
        case Format.CSV:
            print(to_csv(strategy), end="")
        case Format.JSON:
            print(strategy.to_json(), end="")
        case Format.SVG:
            print(svg(strategy_rows(strategy)), end="")


@usage()
def refuse_unused(name: str, option: str, known: object) -> None:
    if option not in known:  # type: ignore[operator]
        problem = Problem(f"{name} has no --{option}", f"leave --{option} out")
        raise StrategyError("schedule", problem)
