"""The time that this process works by itself, without its waits for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import monotonic

from piper.plan.instructions import Instruction, Recv, Run, Send, Total
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Act, Faster, Program
from piper.runtime.gpu.graph_choice import GraphChoice
from piper.runtime.joined_runs import JoinedRuns, Together
from piper.runtime.observe.recorder import title
from piper.runtime.processes.activity import activity

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

    @contextmanager
    def stepping(self, program: Program, look: bool) -> Iterator[Seconds]:
        """Around a step. If `look`, the seconds of its instructions are known afterwards."""
        with timed(program) if look else nullcontext(Seconds()) as seconds:
            yield seconds
        self.inside, self.marked = now() - self.marked, now()

    def taken(self) -> tuple[float, float]:
        """Of the last step, before the next one."""
        found, self.inside = (self.inside, now() - self.marked), 0.0
        return found


def now() -> float:
    """A clock that stands still while this process waits for others."""
    return monotonic() - activity.waited


@contextmanager
def timed(program: Program) -> Iterator[Seconds]:
    """Inside, the program notes how long its instructions take."""
    seconds: Seconds = {}

    def around(what: str, act: Act) -> None:
        began = now()
        act()
        seconds[what] = seconds.get(what, 0.0) + now() - began

    with timed_by(program, around):
        yield seconds


Around = Callable[[str, Act], None]  # runs what has a name, and times it


@dataclass(frozen=True, slots=True)
class TimedActs:
    """The functions of a step, as the program runs them, each inside `around`."""

    program: Program
    inner: Faster | None
    around: Around

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        inner = self.inner
        acts = list(enumerate(self.program.acts)) if inner is None else inner.begin(batch)
        return [(k, partial(self.around, name_of(self.program, k, act), act)) for k, act in acts]


@contextmanager
def timed_by(program: Program, around: Around) -> Iterator[None]:
    """Inside, all functions of a step run in `around`: of single instructions, if possible."""
    before = program.faster
    if one_by_one := runs_the_same(before):
        program.each_alone()
    program.faster = TimedActs(program, None if one_by_one else before, around)
    try:
        yield
    finally:
        program.faster = before


def runs_the_same(faster: Faster | None) -> bool:
    """Whether functions of single instructions run the same kernels, in the same memory."""
    if isinstance(faster, GraphChoice):
        return faster.without and runs_the_same(faster.plain)
    return faster is None or (isinstance(faster, JoinedRuns) and not faster.compiled)


def name_of(program: Program, k: int, act: Act) -> str:
    """What a function of a step does. Some run several instructions: CUDA graphs, joined kernels.

    Then the name is that of the first region and of the last one.
    """
    code = program.plan.instructions
    several = [code[at] for at in act.at] if isinstance(act, Together) else []
    runs = list(dict.fromkeys(doing(one) for one in several if isinstance(one, Run)))
    if len(runs) > 1:
        return f"{runs[0]} to {runs[-1]}"
    return runs[0] if runs else doing(code[k])


def doing(one: Instruction) -> str:
    """What an instruction does. It does the same for every microbatch."""
    match one:
        case Run():
            return f"{one.region}:{one.phase}"
        case Send():
            return f"handling messages to device {one.peer}"
        case Recv():
            return f"handling messages from device {one.peer}"
        case Total():
            return "the sum of the loss over devices"
    return title(one)
