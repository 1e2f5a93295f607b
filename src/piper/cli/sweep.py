"""Simulate a script with every combination of some arguments, in several processes at once."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from itertools import product
from multiprocessing import get_context

from rich.console import Console
from rich.progress import track

from piper.cli.usage import usage
from piper.errors import PiperError, StrategyError
from piper.sim.prediction import Prediction
from piper.view.reports.sweep import SweepResult

WORTH = 10.0  # seconds of work for which it pays to start processes
PRELOADED = ["piper.trainer"]  # once, for all processes

Simulate = Callable[[Sequence[str]], Prediction]  # with these arguments, besides the others


@usage()
def settings_of(sets: Sequence[str]) -> dict[str, list[str]]:
    """
    >>> settings_of(["pp=2,4", "schedule=zbv"])
    {'pp': ['2', '4'], 'schedule': ['zbv']}
    """
    found: dict[str, list[str]] = {}
    for one in sets:
        name, _, values = one.partition("=")
        chosen = [value for value in values.split(",") if value]
        if not name or not chosen:
            raise StrategyError.of("set", f"--set {one}", "write --set microbatches=4,8,16")
        found[name.lstrip("-")] = chosen
    return found


def sweep(
    simulate: Simulate, settings: dict[str, list[str]], worth: float = WORTH
) -> list[SweepResult]:
    """Every combination of the settings, in their order."""
    combinations = [
        dict(zip(settings, values, strict=True)) for values in product(*settings.values())
    ]
    console = Console(stderr=True)
    return list(
        track(
            results(partial(attempt, simulate), combinations, worth), "simulating",
            total=len(combinations), console=console, disable=not console.is_terminal,
        )
    )  # fmt: skip


def results(
    one: Callable[[dict[str, str]], SweepResult], combinations: list[dict[str, str]], worth: float
) -> Iterator[SweepResult]:
    """The first one runs here. It tells whether the others are worth several processes."""
    started = time.perf_counter()
    yield one(combinations[0])
    rest, seconds = combinations[1:], time.perf_counter() - started
    processes = min(os.cpu_count() or 1, len(rest))
    if processes < 2 or seconds * len(rest) < worth:
        yield from map(one, rest)
        return
    # Not forked from this process, which has threads by now.
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(processes, context) as pool:
        yield from pool.map(one, rest)


def attempt(simulate: Simulate, chosen: dict[str, str]) -> SweepResult:
    """Simulate one combination. An error of the script is a result, not the end of the sweep."""
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            given = [word for name, value in chosen.items() for word in (f"--{name}", value)]
            return SweepResult(chosen, simulate(given))
    except PiperError as error:
        return SweepResult(chosen, refused=str(error))
    except SystemExit:
        last = output.getvalue().strip().splitlines()[-1:] or ["the script ended"]
        return SweepResult(chosen, refused=last[0])
    except Exception as error:
        return SweepResult(chosen, refused=f"{type(error).__name__}: {error}")
