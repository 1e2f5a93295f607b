"""Signals to the launcher: the first one asks the processes to end, the second one ends them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import current_thread, main_thread

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SAVE = "PIPER_SAVE_ON_SIGNAL"  # the folder for a checkpoint, read by the Trainer


@dataclass
class Received:
    """The signals that have come so far."""

    numbers: list[int] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of a run that a signal ended; 0 if there was none.

        >>> Received([signal.SIGTERM]).code
        143
        """
        return 128 + self.numbers[0] if self.numbers else 0


_open: list[Received] = []  # the one of this process, if any


@contextmanager
def received_signals() -> Iterator[Received]:
    """Inside, signals that would end this process are noted instead. May be nested.

    Python delivers signals to the main thread only: in another one, none are noted.
    """
    if _open or current_thread() is not main_thread():
        yield _open[0] if _open else Received()
        return
    found = Received()
    _open.append(found)
    previous = {
        number: signal.signal(number, lambda got, _: found.numbers.append(got)) for number in ENDING
    }
    try:
        yield found
    finally:
        _open.clear()
        for number, handler in previous.items():
            signal.signal(number, handler)


def announce(number: int, folder: str | None) -> None:
    """Say what happens. The terminal may be gone."""
    name = signal.Signals(number).name
    plan = f"a checkpoint goes to {folder} after this step" if folder else "the processes end"
    with suppress(OSError):
        print(f"piper: {name}: {plan} (a second signal ends them at once)", file=sys.stderr)
        sys.stderr.flush()
