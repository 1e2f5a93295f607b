"""Targets of commands: a training script, a strategy in JSON, or a schedule in CSV."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piper.cli.files import read_as
from piper.cli.missing import existing
from piper.cli.progress import told_if_slow
from piper.cli.read_arguments import WatchedArguments, warn_of_unread
from piper.costs import Costs
from piper.directives import Strategy
from piper.errors import PiperError, ScriptFailed, StrategyError
from piper.launcher.script_errors import line_of, shortened
from piper.strategies import from_csv

if TYPE_CHECKING:
    from piper.job.inspection import Inspected

STRATEGIES = (".json", ".csv")
NAMES = "name a training script .py, a strategy .json, and a schedule .csv"


def without_model(path: Path) -> StrategyError:
    """What is said of a strategy or schedule in place of a script, or of another file."""
    if path.suffix not in STRATEGIES:
        ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
        return StrategyError.of(
            str(path), f"its name {ending}, which does not say what it is", NAMES
        )
    fix = "give a .py script that makes a Trainer with this strategy" + (
        f": strategies.from_csv(open({path.name!r}).read())" if path.suffix == ".csv" else ""
    )
    return StrategyError.of(str(path), "this command needs a model, not only a strategy", fix)


def with_model(path: Path) -> Path:
    """A strategy may well run as Python, and do nothing."""
    if existing(path).suffix in STRATEGIES:
        raise without_model(path)
    return path


Target = Annotated[
    Path,
    typer.Argument(
        dir_okay=False, metavar="TARGET", callback=existing,
        help="a training script (.py), a strategy (.json) or a schedule (.csv)",
    ),
]  # fmt: skip
Script = Annotated[
    Path,
    typer.Argument(
        dir_okay=False, metavar="SCRIPT", help="a training script (.py)", callback=with_model,
    ),
]  # fmt: skip
WAYS = "give a .py script that makes a Trainer, a strategy .json, or a schedule .csv"


def strategy_of(path: Path) -> Strategy:
    """The strategy in a JSON or CSV file."""
    return read_as(path, from_csv if path.suffix == ".csv" else Strategy.from_json, WAYS)


def inspect(
    script: Path,
    arguments: list[str],
    memory: float | None = None,
    costs: Costs | str | None = None,
) -> Inspected:
    """Run a script up to its Trainer and compile, but do not train.

    `memory`, of a device in GiB, and `costs`, or the name of a data sheet, replace those of the
    Trainer.
    """
    from piper.job.inspection import Inspected, inspecting

    if script.suffix != ".py":
        raise without_model(script)
    sys.argv = watched = WatchedArguments([str(script), *arguments])
    sys.path.insert(0, str(script.resolve().parent))
    name = f"{script.name}: capturing the model and compiling the strategy"
    with told_if_slow(name), inspecting(memory, costs):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Inspected as found:
            if arguments and not watched.was_read:
                warn_of_unread(script, tuple(arguments))
            return without_gaps(found)
        except PiperError as error:
            error.place = line_of(error)
            raise
        except SystemExit:
            raise
        except Exception as error:
            raise ScriptFailed(str(script), shortened(error)) from None
    raise StrategyError.of(str(script), "the script made no Trainer", WAYS)


def without_gaps(found: Inspected) -> Inspected:
    """A run would be refused: no number of processes fits devices of which some are left out."""
    from piper.runtime.processes.world import refuse_gaps

    try:
        refuse_gaps(found.job.strategy.devices)
    except StrategyError as error:
        error.place = line_of(found)
        raise error from None
    return found
