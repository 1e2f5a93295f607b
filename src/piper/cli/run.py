"""piper run: start a script on local processes, one per device."""

from pathlib import Path
from typing import Annotated

import typer

from piper.launch.local import run_local

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_to(app: typer.Typer) -> None:
    app.command("run", context_settings=PASS_ON)(run)


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a training script")],
    processes: Annotated[int, typer.Option("-n", min=1, help="processes, one per device")] = 1,
) -> None:
    """Run SCRIPT on N local processes; what follows is passed on to it."""
    raise typer.Exit(run_local(str(script), context.args, processes))
