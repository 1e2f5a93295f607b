"""piper run: start a script on local processes, one per device."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from piper.launch.local import run_local
from piper.launch.share import shared_gpu
from piper.launch.window import COUNT, FIRST, Window, steps_of

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_to(app: typer.Typer) -> None:
    app.command("run", context_settings=PASS_ON)(run)


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a training script")],
    processes: Annotated[int, typer.Option("-n", min=1, help="processes, one per device")] = 1,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="all on one GPU, each with its share of it")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="record some steps in this file", dir_okay=False)
    ] = None,
    trace_steps: Annotated[
        str, typer.Option(help="which steps to record, FIRST:COUNT")
    ] = f"{FIRST}:{COUNT}",
    trace_profile: Annotated[
        bool, typer.Option("--trace-profile", help="with the operators of each instruction")
    ] = False,
) -> None:
    """Run SCRIPT on N local processes; what follows is passed on to it."""
    sharing: AbstractContextManager[Mapping[str, str]]
    sharing = shared_gpu(processes) if share_gpu else nullcontext({})
    with sharing as extra:
        if trace is None:
            raise typer.Exit(run_local(str(script), context.args, processes, extra))
        window = Window(trace, *steps_of(trace_steps, "--trace-steps"), profile=trace_profile)
        before = written(trace)
        given = {**extra, **window.environment()}
        code = run_local(str(script), context.args, processes, given)
    typer.echo(outcome(window, written(trace) != before, code), err=True)
    raise typer.Exit(code)


def written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def outcome(window: Window, wrote: bool, code: int) -> str:
    """Where the trace is, or why there is none."""
    if wrote:
        return (
            f"piper: the trace is in {window.path}: `piper view {window.path}` shows it, and so "
            "does https://ui.perfetto.dev"
        )
    if code:
        return f"piper: no trace was written: the run failed before {window.text} was over"
    return (
        f"piper: no trace was written: no piper.Trainer came to {window.text}\n"
        "  fix: let the script take more steps, or write --trace-steps 1:1"
    )
