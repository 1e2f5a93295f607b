"""piper run: start a script on local processes or on a cluster, one process per device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.files import is_file
from piper.cli.passed_on import add_command
from piper.cli.target import Script
from piper.cli.usage import count_of_processes, usage
from piper.errors import InputError
from piper.launcher.child import QUIET
from piper.launcher.local import run_local
from piper.launcher.on_ray import address_of, run_on_ray
from piper.launcher.restarts import with_restarts
from piper.launcher.shared_gpu import shared_gpu
from piper.launcher.signals import SAVE
from piper.launcher.trace_window import COUNT, FIRST, Window, steps_of

Processes = Annotated[
    int,
    typer.Option(
        "-n", parser=count_of_processes, metavar="INTEGER", help="processes, one per device"
    ),
]
Restarts = Annotated[int, typer.Option(help="how often to start again after a failure", min=0)]
Least = Annotated[
    int | None,
    typer.Option(help="each restart has one process fewer, down to this number", min=1),
]
SaveOnSignal = Annotated[
    Path | None, typer.Option(help="on Ctrl-C or SIGTERM, finish the step and save to this folder")
]

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="show what the script prints, and errors only")
]


def add_to(app: typer.Typer) -> None:
    add_command(app, "run", run)


def run(
    context: typer.Context,
    script: Script,
    processes: Processes = 1,
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
    restarts: Restarts = 0,
    least: Least = None,
    save_on_signal: SaveOnSignal = None,
    trace: Annotated[
        Path | None, typer.Option(help="record some steps in this file", dir_okay=False)
    ] = None,
    trace_steps: Annotated[
        str, typer.Option(help="which steps of this run to record, FIRST:COUNT")
    ] = f"{FIRST}:{COUNT}",
    trace_profile: Annotated[
        bool, typer.Option("--trace-profile", help="also record the operators of each instruction")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run SCRIPT on N processes.

    Arguments after SCRIPT are passed on to it. Write `--` before options of the script that are
    named like these: `piper run train.py -n 2 -- --help` prints the help of train.py.

    Example: piper run train.py -n 4 --trace run.json
    """
    with usage():
        start = launcher(on, share_gpu)
        window = window_of(trace, trace_steps, trace_profile)
    more = settings(save_on_signal, quiet)
    sharing: AbstractContextManager[Mapping[str, str]]
    sharing = shared_gpu(processes) if share_gpu else nullcontext({})
    with sharing as extra, tracing(window, on) as traced:

        def begin(count: int, attempt: Mapping[str, str]) -> int:
            given = {**extra, **more, **traced.environment, **attempt}
            return start(str(script), context.args, count, given)

        traced.code = with_restarts(begin, processes, restarts, least)
    raise typer.Exit(traced.code)


def window_of(file: Path | None, steps: str, profile: bool) -> Window | None:
    if file is None:
        return None
    return Window(file, *steps_of(steps, "--trace-steps"), profile)


def settings(save_on_signal: Path | None, quiet: bool) -> dict[str, str]:
    """What the processes must know, besides traces."""
    found = {SAVE: str(save_on_signal.absolute())} if save_on_signal else {}
    return {**found, QUIET: "1"} if quiet else found


@dataclass
class Traced:
    """A run that may be recorded: what its processes must know, and its exit code."""

    environment: Mapping[str, str]
    code: int = 0


@contextmanager
def tracing(window: Window | None, on: str | None) -> Iterator[Traced]:
    """Say afterwards where the trace is."""
    if window is None:
        yield Traced({})
        return
    before, traced = written(window.path), Traced(window.environment())
    yield traced
    typer.echo(outcome(window, written(window.path) != before, traced.code, on), err=True)


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
        return f"piper: no trace was written: the run failed before the end of {window.text}"
    if on not in (None, "ray"):
        return (
            f"piper: there is no trace in {window.path} on this host\n"
            f"  fix: look on the host of device 0, or let the script reach {window.text}"
        )
    return (
        f"piper: no trace was written: no piper.Trainer reached {window.text} of this run, whose "
        "first step after `resume` is 1\n"
        "  fix: let the script take more steps, or write --trace-steps 1:1"
    )
