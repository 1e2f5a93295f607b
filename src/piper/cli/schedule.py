"""piper schedule: print the order of any builder."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Annotated

import typer

from piper.errors import Problem, StrategyError
from piper.strategies import BUILDERS, draw, to_csv, to_table


class Format(StrEnum):
    """Output formats."""

    GRID = "grid"
    CSV = "csv"
    JSON = "json"


def add_to(app: typer.Typer) -> None:
    app.command("schedule")(schedule)


def schedule(
    name: Annotated[str, typer.Argument(help=", ".join(BUILDERS))],
    pp: Annotated[int, typer.Option(help="pipeline ranks", min=1)],
    microbatches: Annotated[int, typer.Option(help="microbatches per step", min=1)],
    virtual: Annotated[int | None, typer.Option(help="stages per rank (interleaved)")] = None,
    dp: Annotated[int, typer.Option(help="replicas of every stage", min=1)] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO level of the replicas", min=0, max=3)] = 0,
    mesh: Annotated[
        str | None, typer.Option(help='order of the axes: "pp,dp" puts replicas side by side')
    ] = None,
    format: Annotated[Format, typer.Option(help="csv is the format of PyTorch")] = Format.GRID,
) -> None:
    """Print the order in which a schedule runs."""
    if name not in BUILDERS:
        problem = Problem(f"there is no schedule {name!r}", f"choose one of {', '.join(BUILDERS)}")
        raise StrategyError("schedule", problem)
    build = BUILDERS[name]
    options = {"pp": pp, "microbatches": microbatches, "dp": dp, "zero": zero, "mesh": mesh}
    if virtual is not None:
        refuse_unused(name, "virtual", inspect.signature(build).parameters)
        options["virtual"] = virtual
    strategy = build(**options)
    match format:
        case Format.GRID:
            print(draw(to_table(strategy)))
        case Format.CSV:
            print(to_csv(strategy), end="")
        case Format.JSON:
            print(strategy.to_json(), end="")


def refuse_unused(name: str, option: str, known: object) -> None:
    if option not in known:  # type: ignore[operator]
        problem = Problem(f"{name} has no --{option}", f"leave --{option} out")
        raise StrategyError("schedule", problem)
