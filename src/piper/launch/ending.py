"""How runs end: what to tell the user when processes have failed, and how long to wait."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SYMPTOM = 75  # exit code of a process that stopped only because another one did
GRACE = 3.0  # seconds for the others to stop by themselves


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that is over: its exit code (minus a signal), when it ended, why it failed."""

    rank: int
    code: int
    when: float = 0.0
    reason: str = ""

    @property
    def is_cause(self) -> bool:
        """Processes that were told to stop, or that only lost a peer, caused nothing."""
        return self.code not in (SYMPTOM, -signal.SIGTERM)


def verdict(processes: Sequence[Ended]) -> int:
    """Report the cause, not the symptoms: the earliest failure that was not a lost peer; or else
    one with a reason, and not one that was told to stop."""
    failed = [process for process in processes if process.code]
    if not failed:
        return 0
    causes = [process for process in failed if process.is_cause]
    over = [process.rank for process in processes if process.code == 0]
    if not causes and over:
        print(f"piper: {left_alone(over[0], failed[0].rank)}", file=sys.stderr)
        return 1
    causes = causes or [process for process in failed if process.reason] or failed
    first = min(causes, key=lambda process: process.when)
    reason = first.reason or how(first.code)
    print(f"piper: device {first.rank} failed\n{reason.rstrip()}", file=sys.stderr)
    return first.code if first.code > 0 else 128 - first.code


def left_alone(over: int, other: int) -> str:
    return (
        f"device {over} came to the end of its script while device {other} still waited for it\n"
        "  fix: let every process take the same steps, and make the same calls of the Trainer"
    )


def how(code: int) -> str:
    """What is known of a process that gave no reason.

    >>> how(-9)
    '  it was ended by signal SIGKILL'
    """
    way = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"  it was ended {way}"


@contextmanager
def orderly() -> Iterator[None]:
    """A request to end (SIGTERM) ends this process like an exception: what it started goes too."""
    told: list[int] = []

    def leave(number: int, _: object) -> None:
        told.append(number)
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except BaseException:
        if told:  # whatever a library made of it
            sys.exit(128 + told[0])
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
