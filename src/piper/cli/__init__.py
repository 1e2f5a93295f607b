"""The command line: one file per command, each a thin layer over a function."""

import sys

import typer

from piper.cli import check, checkpoint, run, schedule, show, simulate, view
from piper.errors import PiperError

app = typer.Typer(
    help="Piper: programmable distributed training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
