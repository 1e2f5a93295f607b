"""Start a run again after a failure. Its script goes on from its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable

from piper.launcher.signals import received_signals
from piper.names import amount

ATTEMPT = "PIPER_RESTART"  # how often the run was started before


def with_restarts(
    start: Callable[[int, dict[str, str]], int], processes: int, restarts: int, least: int | None
) -> int:
    """Start a run, and again after each failure, `restarts` times at most. Returns its exit code.

    `start` gets the number of processes and more environment variables. Given `least`, every
    restart has one process less, down to that number: a strategy that is a function of the number
    of devices adapts to it. A signal to the launcher is not a failure.
    """
    code = 0
    with received_signals() as received:
        for attempt in range(restarts + 1):
            code = start(processes, {ATTEMPT: str(attempt)})
            if code == 0 or received.numbers or attempt == restarts:
                break
            processes = max(processes - 1, least) if least is not None else processes
            count = amount(processes, "process", "processes")
            text = f"piper: restart {attempt + 1} of {restarts}, with {count}"
            print(text, file=sys.stderr, flush=True)
    return code
