"""The end of a run: which failure to report, and how long to wait for the others."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from piper.launcher.signals import ENDING

SYMPTOM = 75  # exit code of a process that stopped because another one did
GRACE = 3.0  # seconds for the others to stop by themselves
HINTS: dict[int, str] = {
    signal.SIGKILL: " (by a person, or by the kernel if the host ran out of memory: see `dmesg`)",
    signal.SIGSEGV: " (in code that is not Python: an extension, or torch itself)",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Why a process failed, and the device that it waited for, if it was one."""

    reason: str = ""
    culprit: int | None = None
    when: float = 0.0  # by a clock of the host that never jumps; 0 if the process was killed
    line: str = ""  # of the script, where it waited

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        """A process that is killed while it writes leaves half a report."""
        try:
            found = Report(**json.loads(text))
        except (RecursionError, TypeError, ValueError):
            return Report()
        known = isinstance(found.reason, str) and isinstance(found.when, int | float)
        whole = known and isinstance(found.culprit, int | None) and isinstance(found.line, str)
        return found if whole else Report()


def report_in(path: Path) -> Report:
    """What a process has written, if it has written any."""
    try:
        return Report.from_json(path.read_text(errors="replace") if path.is_file() else "")
    except OSError:
        return Report()


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended: its exit code (or minus a signal), when, and why it failed."""

    rank: int
    code: int
    when: float = 0.0
    reason: str = ""
    culprit: int | None = None
    asked: bool = False  # the launcher ended it
    line: str = ""

    @property
    def is_cause(self) -> bool:
        """Not if the launcher ended the process, or it only lost a peer."""
        return self.code != SYMPTOM and not self.asked


def verdict(processes: Sequence[Ended]) -> int:
    """Print the cause of a failure, and return its exit code."""
    code, text = cause(processes)
    if code:
        print(f"piper: {text}", file=sys.stderr)
    return code


def cause(processes: Sequence[Ended]) -> tuple[int, str]:
    """The exit code of a run, and the cause of its failure; 0 and nothing if all went well.

    The cause is the earliest failure that is not a lost peer, on the first device that met it. If
    there is none, it is a process with a reason, rather than one that was asked to stop.
    """
    failed = [process for process in processes if process.code]
    if not failed:
        return 0, ""
    causes = [process for process in failed if process.is_cause]
    named = [process for process in failed if process.culprit is not None]
    if not causes and named:
        first = named[0]
        return 1, f"device {first.culprit} held up the others\n  {first.reason.strip()}"
    over = [process.rank for process in processes if process.code == 0]
    if not causes and over:
        return 1, unequal_ends(over[0], failed[0])
    causes = causes or [process for process in failed if process.reason] or failed
    first = min(causes, key=lambda process: process.when)
    same = (one for one in causes if first.reason and one.reason == first.reason)
    first = min(same, key=lambda process: process.rank, default=first)
    reason = first.reason or exit_text(first.code)
    code = first.code if first.code > 0 else 128 - first.code
    return code, f"device {first.rank} failed\n{reason.rstrip()}"


def unequal_ends(over: int, other: Ended) -> str:
    return (
        f"device {over} reached the end of its script while device {other.rank} still waited for "
        f"it{other.line}\n"
        "  fix: run the same steps and make the same calls of the Trainer in every process"
    )


def exit_text(code: int) -> str:
    """How a process ended that gave no reason.

    >>> exit_text(-15)
    '  it was ended by signal SIGTERM'
    >>> exit_text(-37)  # one without a name
    '  it was ended by signal 37'
    """
    if code >= 0:
        return f"  it ended with exit code {code}"
    names = {one.value: one.name for one in signal.Signals}
    return f"  it was ended by signal {names.get(-code, -code)}{HINTS.get(-code, '')}"


@contextmanager
def signals_raise() -> Iterator[None]:
    """Signals end this process like an exception, so that clean-up code runs."""
    received: list[int] = []

    def leave(number: int, _: object) -> None:
        received.append(number)
        sys.exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in ENDING}
    try:
        yield
    except BaseException:
        if received:  # even if a library replaced SystemExit by its own error
            sys.exit(128 + received[0])
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
