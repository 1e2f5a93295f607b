"""How long a GPU works without its waits, by marks that are read when it has passed them.

There is no GPU here: a stream with a clock of its own stands for it. The host queues work and goes
on, at most two steps ahead.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from piper.plan.instructions import Fetch, Recv, Run
from piper.runtime.execute import waited
from piper.runtime.gpu.graph_choice import GraphChoice
from piper.runtime.joined_runs import JoinedRuns, Together
from piper.runtime.observe import own_time
from piper.runtime.observe.gpu_time import EVERY, GpuTime
from piper.runtime.processes.activity import activity

AHEAD = 2  # steps


@dataclass
class Stream:
    """Work that was queued ends at `time`. The GPU has got to `reached`."""

    time: float = 0.0
    reached: float = 0.0
    host: float = 0.0
    ends: deque[float] = field(default_factory=deque)

    def work(self, seconds: float) -> None:
        self.time = max(self.time, self.host) + seconds

    def until(self, when: float) -> None:
        self.time = max(self.time, when)

    def begin_step(self) -> None:
        while len(self.ends) >= AHEAD:
            self.reached = self.ends.popleft()
            self.host = max(self.host, self.reached)


@dataclass
class Mark:
    stream: Stream
    at: float = -1.0

    def record(self) -> None:
        self.stream.work(0.0)
        self.at = self.stream.time

    def elapsed_time(self, end_event: Mark) -> float:
        assert self.at <= self.stream.reached and end_event.at <= self.stream.reached
        return 1e3 * (end_event.at - self.at)

    def synchronize(self) -> None:
        self.stream.reached = max(self.stream.reached, self.at)


@dataclass
class Message:
    stream: Stream
    comes: float  # seconds after the work before it

    def wait(self) -> str:
        self.stream.until(self.stream.time + self.comes)
        return "arrived"


def program(stream: Stream, *acts: Any, code: tuple[Any, ...] = ()) -> Any:
    """Functions of a step, and the instructions that they stand for."""
    plan = SimpleNamespace(instructions=code)
    return SimpleNamespace(
        plan=plan, acts=list(acts), faster=None, arrival=waited, each_alone=lambda: None
    )


@dataclass
class Recorded:
    """What a step runs, if several instructions are one CUDA graph."""

    acts: list[Any]

    def begin(self, _: object) -> list[Any]:
        return self.acts


def run(region: str) -> Run:
    return Run("node", region, "F", (), ())


def recv() -> Recv:
    return Recv("node", "h", (), 1, "pp")


def fetch() -> Fetch:
    return Fetch("node", "h.host", "h", (), "pp")


def step(own: GpuTime, stream: Stream, one: Any, look: bool = False) -> tuple[float, float]:
    """As the Trainer does: learn what is known, then run."""
    stream.begin_step()
    known = own.taken()
    with own.stepping(one, look):
        for act in one.acts:
            act()
    stream.ends.append(stream.time)
    return known


def timed(own: GpuTime, stream: Stream, one: Any, steps: int = 2 * EVERY) -> list[Any]:
    found = [step(own, stream, one) for _ in range(steps)]
    return [times for times in found if times != (0.0, 0.0)]


def test_waits_of_the_stream_for_others_are_no_work() -> None:
    stream = Stream()
    own, code = GpuTime(lambda: Mark(stream)), (run("PP0"), recv(), run("PP1"))
    one = program(
        stream,
        lambda: stream.work(0.02),
        lambda: one.arrival(1, Message(stream, 0.5)),
        lambda: stream.work(0.03),
        code=code,
    )

    found = timed(own, stream, one)

    assert found == [pytest.approx((0.05, 0.0))] * 2
    assert one.arrival(1, Message(stream, 0.0)) == "arrived"
    assert one.arrival is waited, "it is put back"


def test_a_copy_from_the_host_is_own_work() -> None:
    stream = Stream()
    one = program(stream, lambda: one.arrival(0, Message(stream, 0.07)), code=(fetch(),))

    assert timed(GpuTime(lambda: Mark(stream)), stream, one) == [pytest.approx((0.07, 0.0))] * 2


def test_a_loader_that_the_gpu_waits_for_is_between_steps() -> None:
    """It counts as far as the GPU idles, and not while the host waits for others."""
    stream = Stream()
    own, one = GpuTime(lambda: Mark(stream)), program(stream, lambda: stream.work(0.02))
    late = []
    for _ in range(2 * EVERY):
        late.append(step(own, stream, one))
        stream.host = stream.time + 0.04
    assert [times for times in late if times[0]] == [pytest.approx((0.02, 0.04))] * 2

    waiting = []
    for _ in range(2 * EVERY):
        waiting.append(step(own, stream, one))
        stream.host = stream.time + 0.04
        activity.waited += 0.03
    assert [times for times in waiting if times[0]][1:] == [pytest.approx((0.02, 0.01))]


def test_no_mark_is_read_before_the_gpu_has_passed_it() -> None:
    """`Mark` refuses that. The marks of a step are those of the last one that was timed."""
    draw, stream, made = random.Random(0), Stream(), []

    def mark() -> Mark:
        made.append(Mark(stream))
        return made[-1]

    own, seconds = GpuTime(mark), 0.0
    for number in range(40):
        seconds = draw.uniform(0.01, 0.1) if number % EVERY == 0 else seconds
        one = program(stream, lambda long=seconds: stream.work(long))
        known = step(own, stream, one)
        if number % EVERY == EVERY - 1:
            assert known == pytest.approx((seconds, 0.0))
        stream.host += draw.choice((0.0, 1e-3))
    assert len(made) == 3


def test_a_look_names_what_takes_long() -> None:
    stream = Stream()
    code = (run("PP0"), recv(), run("PP1"), run("PP2"))
    one = program(stream, code=code)
    one.faster = graphs = Recorded(
        [
            (0, lambda: stream.work(0.02)),
            (1, lambda: (one.arrival(1, Message(stream, 0.5)), stream.work(0.001))),
            (2, Together((2, 3), lambda: stream.work(0.03))),
        ]
    )
    own = GpuTime(lambda: Mark(stream))

    with own.stepping(one, look=True) as seconds:
        for _, act in one.faster.begin(None):
            act()

    assert seconds["PP0:F"] == pytest.approx(0.02)
    assert seconds["PP1:F to PP2:F"] == pytest.approx(0.03)
    assert sum(seconds.values()) == pytest.approx(0.051), "without the wait"
    assert one.faster is graphs and one.arrival is waited


def test_functions_are_named_by_the_regions_that_they_run() -> None:
    one = program(Stream(), code=(run("PP0"), recv(), run("PP1"), run("PP0")))
    names = [((0,), "PP0:F"), ((0, 3), "PP0:F"), ((0, 1, 2, 3), "PP0:F to PP1:F")]

    for at, name in names:
        assert own_time.name_of(one, 0, Together(at, lambda: None)) == name
    assert own_time.name_of(one, 2, lambda: None) == "PP1:F"


def test_joined_kernels_run_alone_if_that_is_the_same() -> None:
    """Compiled ones may round differently, and CUDA graphs have memory of their own."""
    made: list[str] = []
    one = program(Stream(), lambda: None, lambda: None, code=(run("PP0"), run("PP1")))
    one.each_alone = lambda: made.append("kernels")
    joined = [(0, Together((0, 1), lambda: None))]
    both = JoinedRuns(joined)
    chosen = GraphChoice(one, both, lambda: both, lambda: 0.0, free=int, reserved=int)
    found = []
    for faster in (JoinedRuns(joined), JoinedRuns(joined, compiled=True), chosen, chosen):
        one.faster = faster
        with own_time.timed(one) as seconds:
            for _, act in one.faster.begin(None):
                act()
        found.append([*seconds])
        chosen.chosen = True

    alone, together = ["PP0:F", "PP1:F"], ["PP0:F to PP1:F"]
    assert found == [alone, together, alone, alone]
    assert made == ["kernels"] * 3
