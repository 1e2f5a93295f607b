"""The time that this process works by itself, without its waits for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from piper.plan.instructions import Instruction, Run
from piper.runtime.batch import StepInputs
from piper.runtime.comm.activity import activity
from piper.runtime.execute import Act, Program
from piper.runtime.observe.recorder import title

Seconds = dict[str, float]  # by what an instruction does


class OwnTime:
    """Seconds of work in a step, and from its end to the start of the next one.

    In a run without faults, all steps of all devices take the same time: they wait for each other.
    The slowest device is the one that waits least.
    """

    def __init__(self) -> None:
        self.marked = now()
        self.inside = 0.0

    def begin(self) -> None:
        """All processes have agreed on a step."""
        self.marked = now()

    def end(self) -> None:
        """The step is over."""
        self.inside, self.marked = now() - self.marked, now()

    def taken(self) -> tuple[float, float]:
        """Of the last step, before the next one."""
        found, self.inside = (self.inside, now() - self.marked), 0.0
        return found


def now() -> float:
    """A clock that stands still while this process waits for others."""
    return monotonic() - activity.waited


@dataclass
class TimedActs:
    """The functions of a step, as the program runs them. Each adds up the seconds it works."""

    program: Program
    seconds: Seconds = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inner = self.program.faster

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        inner, code = self.inner, self.program.plan.instructions
        acts = enumerate(self.program.acts) if inner is None else inner.begin(batch)
        return [(k, partial(self.timed, doing(code[k]), act)) for k, act in acts]

    def timed(self, what: str, act: Callable[[], None]) -> None:
        began = now()
        act()
        self.seconds[what] = self.seconds.get(what, 0.0) + now() - began


@contextmanager
def timed(program: Program) -> Iterator[Seconds]:
    """Inside, the program notes how long its instructions take."""
    found = TimedActs(program)
    program.faster = found
    try:
        yield found.seconds
    finally:
        program.faster = found.inner


def doing(one: Instruction) -> str:
    """What an instruction does. It does the same for every microbatch."""
    return f"{one.region}:{one.phase}" if isinstance(one, Run) else title(one)
