"""piper checkpoint: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from piper.cli.help import Command, Group
from piper.cli.terminal import show_text, window_of

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="what trainer.save wrote, or one of its step-N")
]


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at checkpoints.", no_args_is_help=True, cls=Group)
    group.callback()(lambda: None)  # so that `show` is a command of its own
    group.command("show", cls=Command)(show)
    app.add_typer(group, name="checkpoint")


def show(
    folder: Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="list the model's tensors")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="read everything, and compare it with its digests")
    ] = False,
) -> None:
    """Show what is in FOLDER. Nothing of it is executed."""
    from piper.runtime.checkpoint.summary import summary, tensor_lines, verified  # imports torch

    show_text("\n".join(summary(folder)), window_of(None, None))
    for line in tensor_lines(folder) if tensors else ():
        print(line)
    if verify:
        print(f"verified: all {verified(folder)} pieces are as they were written")
