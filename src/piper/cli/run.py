"""piper run: start a script on local processes or on a cluster, one process per device."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.files import is_file
from piper.cli.target import PASS_ON
from piper.errors import InputError
from piper.launch.local import run_local
from piper.launch.on_ray import address_of, run_on_ray
from piper.launch.shared_gpu import shared_gpu
from piper.launch.trace_window import COUNT, FIRST, Window, steps_of


def add_to(app: typer.Typer) -> None:
    app.command("run", context_settings=PASS_ON)(run)


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="a training script")],
    processes: Annotated[int, typer.Option("-n", min=1, help="processes, one per device")] = 1,
    on: Annotated[
        str | None,
        typer.Option(help="a cluster: ray (on this machine), ray:HOST:PORT or ray://HOST:PORT"),
    ] = None,
    share_gpu: Annotated[
        bool,
        typer.Option(
            "--share-gpu", help="run all processes on one GPU, each with a part of its SMs"
        ),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="record some steps in this file", dir_okay=False)
    ] = None,
    trace_steps: Annotated[
        str, typer.Option(help="which steps to record, FIRST:COUNT")
    ] = f"{FIRST}:{COUNT}",
    trace_profile: Annotated[
        bool, typer.Option("--trace-profile", help="also record the operators of each instruction")
    ] = False,
) -> None:
    """Run SCRIPT on N processes. Arguments after it are passed on to it."""
    start = launcher(on, share_gpu)
    sharing: AbstractContextManager[Mapping[str, str]]
    sharing = shared_gpu(processes) if share_gpu else nullcontext({})
    with sharing as extra:
        if trace is None:
            raise typer.Exit(start(str(script), context.args, processes, extra))
        window = Window(trace, *steps_of(trace_steps, "--trace-steps"), profile=trace_profile)
        before = written(trace)
        given = {**extra, **window.environment()}
        code = start(str(script), context.args, processes, given)
    typer.echo(outcome(window, written(trace) != before, code, on), err=True)
    raise typer.Exit(code)


def launcher(on: str | None, share_gpu: bool) -> Callable[..., int]:
    """The function that starts the processes."""
    if on is None:
        return run_local
    if share_gpu:
        what = "the processes of a cluster have GPUs of their own"
        fix = "leave out --share-gpu, or leave out --on and use a GPU of this machine"
        raise InputError.of("--share-gpu", what, fix)
    return partial(run_on_ray, address_of(on))


def written(path: Path) -> int:
    return path.stat().st_mtime_ns if is_file(path) else 0


def outcome(window: Window, wrote: bool, code: int, on: str | None = None) -> str:
    """Where the trace is, or why there is none."""
    if wrote:
        return (
            f"piper: the trace is in {window.path}: `piper view {window.path}` shows it, and so "
            "does https://ui.perfetto.dev"
        )
    if code:
        return f"piper: no trace was written: the run failed before {window.text} was over"
    if on not in (None, "ray"):
        return (
            f"piper: there is no trace in {window.path} on this host\n"
            f"  fix: look on the host of device 0, or let the script reach {window.text}"
        )
    return (
        f"piper: no trace was written: no piper.Trainer reached {window.text}\n"
        "  fix: let the script take more steps, or write --trace-steps 1:1"
    )
