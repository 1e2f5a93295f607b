"""What the main thread of this process is doing: it waits for others, or it works by itself.

Marking a wait costs two assignments, so every message can be marked. The text is made only if
another process asks (runtime/processes/waits.py).
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

Describe = Callable[[], tuple[str, tuple[int, ...]]]  # of a wait: what for, and the peers
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
_PIPER = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Status:
    """What a device does, and since how many seconds. `peers` are those that it waits for."""

    device: int
    what: str
    seconds: float
    peers: tuple[int, ...] = ()  # none: it does not wait

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> Status:
        peers = tuple(found["peers"])
        return Status(found["device"], found["what"], found["seconds"], peers)


class Activity:
    """The current wait, if any, and when it or the work after the last one began."""

    def __init__(self) -> None:
        self.wait: Describe | None = None
        self.since = monotonic()
        self.waited = 0.0  # seconds of all waits so far

    def begin(self, wait: Describe) -> None:
        self.since, self.wait = monotonic(), wait

    def end(self) -> None:
        before, self.wait, self.since = self.since, None, monotonic()
        self.waited += self.since - before

    @property
    def seconds(self) -> float:
        return monotonic() - self.since

    def status(self, device: int) -> Status:
        seconds = self.seconds
        if (wait := self.wait) is not None:
            what, peers = wait()
            return Status(device, what, seconds, tuple(one for one in peers if one != device))
        return Status(device, main_thread_text(), seconds)


activity = Activity()  # of this process


@contextmanager
def waiting(what: str, peers: tuple[int, ...]) -> Iterator[None]:
    """Inside, the main thread waits for these devices. Other threads write checkpoints."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    activity.begin(lambda: (what, peers))
    try:
        yield
    finally:
        activity.end()


def main_thread_text() -> str:
    """The line of the user's code at which the main thread is."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    return f"at {user_line(frame)}" if frame else "at an unknown line"


def user_line(frame: FrameType) -> str:
    """The innermost line that is neither Piper's nor a library's; or else the innermost one."""
    found: FrameType | None = frame
    while found is not None:
        name = found.f_code.co_filename
        if not name.startswith((*_LIBRARIES, _PIPER)):
            break
        found = found.f_back
    at = found or frame
    return f"{Path(at.f_code.co_filename).name}:{at.f_lineno} ({at.f_code.co_name})"
