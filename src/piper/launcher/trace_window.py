"""Which steps to trace, and the file to write: set by the launcher, read by the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from piper.errors import InputError

FILE, STEPS, PROFILE = "PIPER_TRACE", "PIPER_TRACE_STEPS", "PIPER_TRACE_PROFILE"
FIRST, COUNT = 3, 3  # the first steps are slower: they allocate memory and optimizer states


@dataclass(frozen=True, slots=True)
class Window:
    """`count` steps from `first` on. The first step that a run trains is 1, also after `resume`."""

    path: Path
    first: int = FIRST
    count: int = COUNT
    profile: bool = False  # also profile the operators of each instruction

    def __contains__(self, step: int) -> bool:
        return self.first <= step < self.first + self.count

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def text(self) -> str:
        """
        >>> Window(Path("run.json"), 3, 1).text
        'step 3'
        """
        return f"steps {self.first} to {self.last}" if self.count > 1 else f"step {self.first}"

    def environment(self) -> dict[str, str]:
        """The environment variables from which a process makes the same window."""
        found = {FILE: str(self.path.absolute()), STEPS: f"{self.first}:{self.count}"}
        return {**found, PROFILE: "1"} if self.profile else found


def window_in(environment: Mapping[str, str]) -> Window | None:
    """The window that the launcher or the user set.

    >>> window_in({"PIPER_TRACE": "run.json", "PIPER_TRACE_STEPS": "10:2"}).text
    'steps 10 to 11'
    """
    if not environment.get(FILE):
        return None
    first, count = steps_of(environment.get(STEPS, f"{FIRST}:{COUNT}"), STEPS)
    return Window(Path(environment[FILE]), first, count, environment.get(PROFILE) == "1")


def steps_of(text: str, where: str) -> tuple[int, int]:
    """`first:count`, or `first` for one step."""
    first, _, count = text.partition(":")
    try:
        found = int(first), int(count or 1)
    except ValueError:
        found = 0, 0
    if min(found) < 1:
        raise InputError.of(
            where, f"{text!r} names no steps", "write FIRST:COUNT, for example 3:3 or 10:1"
        )
    return found
