"""The time that a GPU works by itself, without its waits for others.

The host queues a step long before the GPU runs it, so the host's clock says nothing about the GPU.
CUDA events do. In some steps they are recorded on the compute stream: when the step begins and
ends, and around every wait for another device. They are read when the GPU has passed them for
certain, so the host never waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from piper.plan.instructions import Fetch, Store
from piper.runtime.comm.gloo import Handle
from piper.runtime.execute import Act, Program
from piper.runtime.observe.own_time import Seconds, timed_by
from piper.runtime.processes.activity import activity

EVERY = 4  # steps, of which one is timed
KNOWN = 3  # steps later: the host is at most two steps ahead of the GPU


class Event(Protocol):
    """A mark on a stream."""

    def record(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...

    def synchronize(self) -> None: ...


MakeEvent = Callable[[], Event]
cuda_event: MakeEvent = partial(torch.cuda.Event, enable_timing=True)


class GpuTime:
    """Seconds of work in a step, and from its end to the start of the next one.

    Both end when the GPU gets there. What the host does too late is time in which the GPU idles, so
    it counts as work, unless the host itself waits for others. What the host does while the GPU is
    busy costs nothing.
    """

    def __init__(self, event: MakeEvent = cuda_event) -> None:
        self.event, self.steps = event, 0
        self.marks, self.used = list[Event](), 0  # recorded again in each step that is timed
        self.waits: list[tuple[int, int]] = []  # marks around them
        self.over = 0  # the mark at the end of the step
        self.waited = 0.0  # of the host between two steps, in seconds

    def begin(self) -> None:
        """All processes have agreed on a step. The GPU begins it later."""

    def taken(self) -> tuple[float, float]:
        """Of the last step that was timed, once. Zeros: it is not known now."""
        if self.steps % EVERY != KNOWN or self.used == 0:
            return 0.0, 0.0
        inside = self.between(0, self.over) - sum(self.between(*one) for one in self.waits)
        idle, self.used = self.between(self.over, self.used - 1), 0
        return inside, max(0.0, idle - self.waited)

    @contextmanager
    def stepping(self, program: Program, look: bool) -> Iterator[Seconds]:
        """Around a step, on its stream. If `look`, the seconds of its instructions are known."""
        number, self.steps = self.steps % EVERY, self.steps + 1
        if number == 1 and self.used:
            self.mark()
            self.waited = activity.waited - self.waited
        if look:
            with looking(program, self.event) as seconds:
                yield seconds
            return
        if number != 0:
            yield {}
            return
        self.used, self.waits = 0, []
        self.mark()
        with each_wait(program, self.around):
            yield {}
        self.over = self.mark()
        self.waited = activity.waited

    def around(self, wait: Act) -> None:
        before = self.mark()
        wait()
        self.waits.append((before, self.mark()))

    def mark(self) -> int:
        """Record the next event. Returns its number."""
        if self.used == len(self.marks):
            self.marks.append(self.event())
        self.marks[self.used].record()
        self.used += 1
        return self.used - 1

    def between(self, first: int, last: int) -> float:
        return self.marks[first].elapsed_time(self.marks[last]) / 1e3


@contextmanager
def each_wait(program: Program, around: Callable[[Act], None]) -> Iterator[None]:
    """Inside, `around` is given every wait for another device. Copies to the host are own work."""
    plain, code = program.arrival, program.plan.instructions

    def arrival(k: int, handle: Handle) -> Any:
        if isinstance(code[k], Store | Fetch):
            return plain(k, handle)
        found: list[Any] = []
        around(lambda: found.append(plain(k, handle)))
        return found[0]

    program.arrival = arrival
    try:
        yield
    finally:
        program.arrival = plain


@contextmanager
def looking(program: Program, event: MakeEvent) -> Iterator[Seconds]:
    """Inside, events are recorded around all that a step does. In the end, the host waits."""
    marks, names = list[Event](), list[str]()

    def note(name: str) -> None:
        marks.append(event())
        marks[-1].record()
        names.append(name)

    def around_wait(wait: Act) -> None:
        here = names[-1] if names else ""
        note("")
        wait()
        note(here)

    def around_act(what: str, act: Act) -> None:
        note(what)
        act()
        note("")

    seconds: Seconds = {}
    with each_wait(program, around_wait), timed_by(program, around_act):
        yield seconds
    if marks:
        marks[-1].synchronize()
        seconds.update(sums(marks, names))


def sums(marks: Sequence[Event], names: Sequence[str]) -> Seconds:
    """Seconds by name: each mark says what comes after it, if it is own work."""
    found: Seconds = {}
    for name, (first, last) in zip(names, pairwise(marks), strict=False):
        if name:
            found[name] = found.get(name, 0.0) + first.elapsed_time(last) / 1e3
    return found
