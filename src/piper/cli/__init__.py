"""The command line: one file per command, each a thin layer over a function."""

import sys
from typing import Annotated

import typer

from piper import __version__
from piper.cli import check, checkpoint, run, schedule, show, simulate, view
from piper.cli.help import Group
from piper.errors import PiperError

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # lines of a docstring are joined, and wrapped to the terminal
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"piper {__version__}")
        raise typer.Exit


@app.callback()
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


for command in (run, show, check, schedule, simulate, view, checkpoint):
    command.add_to(app)


def main() -> None:
    """Exit code 1 for the user's mistake, 2 for wrong usage."""
    try:
        app()
    except PiperError as error:
        print(f"piper: {error}{error.place}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
