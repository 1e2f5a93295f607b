"""The command line: one file per command, each a thin layer over a function."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from piper import __version__
from piper.cli.help import Group
from piper.errors import PiperError

if TYPE_CHECKING:
    app: typer.Typer

COMMANDS = ("run", "show", "check", "schedule", "simulate", "view", "checkpoint")


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"piper {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """Piper: programmable distributed training for PyTorch.

    Exit codes: 0 if all is well, 1 if the strategy, the script or a file is wrong, 2 for wrong
    usage. Errors go to stderr. In a file or a pipe, output has no colours and is not cut.

    Examples: piper run train.py -n 4; piper show train.py; piper view train.py --device h200
    """


def app_of(commands: Sequence[str]) -> typer.Typer:
    """The command line with some of its commands. To load one of them takes time."""
    found = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # lines of a docstring are joined, and wrapped to the terminal
    )
    found.callback()(options)
    for name in commands:
        import_module(f"piper.cli.{name}").add_to(found)
    return found


def __getattr__(name: str) -> typer.Typer:
    if name == "app":  # with all commands
        return app_of(COMMANDS)
    raise AttributeError(f"module 'piper.cli' has no attribute {name!r}")


def main() -> None:
    """Exit code 1 for a mistake in a script or a file, 2 for wrong usage."""
    wanted = [name for name in COMMANDS if [name] == sys.argv[1:2]]
    try:
        app_of(wanted or COMMANDS)()
    except PiperError as error:
        print(f"piper: {error}{error.place}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
