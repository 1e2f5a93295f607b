"""The command line: one file per command, each a thin layer over a function."""

import sys
from typing import Annotated

import typer

from piper import __version__
from piper.cli import check, checkpoint, run, schedule, show, simulate, view
from piper.errors import PiperError

app = typer.Typer(
    help="Piper: programmable distributed training for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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
    """Piper: programmable distributed training for PyTorch."""


for command in (run, show, check, schedule, simulate, view, checkpoint):
    command.add_to(app)


def main() -> None:
    """Exit code 1 for the user's mistake, 2 for wrong usage."""
    try:
        app()
    except PiperError as error:
        print(f"piper: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
