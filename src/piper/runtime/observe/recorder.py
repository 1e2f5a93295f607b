"""Record when every instruction of a step ran on one device.

Steps that are not recorded run the plain functions of a program. Recorded steps run functions that
also read the clock: once per instruction, once more if it waits, and twice for each message that is
waited for. A computation ends when the host reaches the next instruction. A message ends when

- a token all-to-all, or another task of an exchange thread: the thread is done,
- a collective: gloo is done (a callback of its future, which needs the GIL: tens of us late),
- a receive: the host's wait returned; if it returned at once, it ended earlier (`late`),
- a send: the peer's receive has ended (see `merged`), or the host's wait returned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from piper.plan.analyse.trace import MEASURED, Span, Trace
from piper.plan.instructions import Instruction, Plan, Recv, Send, is_message, line
from piper.plan.rendezvous import Event, Rendezvous
from piper.runtime.batch import StepInputs
from piper.runtime.comm.exchange_thread import Task
from piper.runtime.comm.gloo import SumOfPieces, Works
from piper.runtime.comm.in_flight import Arrived, Shards
from piper.runtime.execute import Act, Program
from piper.runtime.observe.clocks import Clock
from piper.runtime.observe.device_times import Times
from piper.runtime.processes.wire_format import travels

AT_ONCE = 20_000  # nanoseconds: a shorter wait counts as no wait


@travels
@dataclass(frozen=True, slots=True)
class Notes:
    """One step of one device: clock readings in nanoseconds, by position in the plan."""

    issued: list[int]
    start: list[int]
    end: list[int]
    late: list[bool]  # it ended earlier, at an unknown time


class Recorder:
    """Runs recorded steps of a program. Everything is set up before the first of them."""

    def __init__(
        self, program: Program, clock: Clock = time.perf_counter_ns, named: bool = False
    ) -> None:
        count = len(program.plan.instructions)
        program.each_alone()
        self.program, self.clock, self.named = program, clock, named
        self.issued, self.started = [0] * count, [0] * count
        self.came, self.waited = [0] * count, [0] * count  # when the host began and ended its wait
        self.ended = [0] * count  # reported by a callback
        self.over = 0
        self.acts = [self.act(k, one) for k, one in enumerate(program.plan.instructions)]
        if self.acts:
            self.acts[-1] = self.last(self.acts[-1])

    def step(self, batch: StepInputs) -> None:
        """Run one step like `Program.step`."""
        plain, self.program.acts = self.program.acts, self.acts
        try:
            self.program.step(batch)
        finally:
            self.program.acts = plain

    def notes(self) -> Notes:
        """The clock readings of the last step. Missing ones are filled in from their neighbours."""
        ends, late = [*self.issued[1:], self.over], [False] * len(self.issued)
        starts = [after or at for after, at in zip(self.started, self.issued, strict=True)]
        for k, one in enumerate(self.program.plan.instructions):
            if is_message(one):
                ends[k] = min(self.ended[k] or self.waited[k], self.waited[k])
                late[k] = not self.ended[k] and self.waited[k] - self.came[k] < AT_ONCE
        self.ended[:] = [0] * len(ends)  # messages without a callback do not write it
        return Notes(list(self.issued), starts, ends, late)

    def act(self, k: int, instruction: Instruction) -> Act:
        """The instruction's function, with the clock read around it."""
        program, clock, issued, started = self.program, self.clock, self.issued, self.started
        do = self.posting(k, instruction)
        waits = tuple(w for w in instruction.waits if is_message(program.plan.instructions[w]))

        def noted() -> None:
            issued[k] = clock()
            do()

        def waited_and_noted() -> None:
            issued[k] = clock()
            for w in waits:
                program.wait_one(w)
            started[k] = clock()
            do()

        return waited_and_noted if waits else noted

    def posting(self, k: int, instruction: Instruction) -> Act:
        """The instruction without its waits. The handle of a message is watched."""
        do = self.ranged(instruction, self.program.plain(k, instruction))
        if not is_message(instruction):
            return do
        program, alone = self.program, isinstance(instruction, Send | Recv)

        def post() -> None:
            do()
            handle = program.handles[k]
            if not alone:
                self.listen(k, handle)
            program.handles[k] = Watched(handle, k, self)

        return post

    def ranged(self, instruction: Instruction, do: Act) -> Act:
        """Name the operators of an instruction after its node, for a profiler."""
        if not self.named:
            return do
        name = title(instruction)

        def act() -> None:
            with record_function(name):
                do()

        return act

    def listen(self, k: int, handle: Any) -> None:
        """Note when a message ends. With several futures, the last one counts."""
        clock, ended = self.clock, self.ended

        def done(_: Any) -> None:
            ended[k] = clock()

        for future in futures(handle):
            future.add_done_callback(done)

    def last(self, act: Act) -> Act:
        def then_over() -> None:
            act()
            self.over = self.clock()

        return then_over


@dataclass(slots=True)
class Watched:
    """A handle that notes when the host begins and ends its wait."""

    handle: Any
    at: int
    recorder: Recorder

    def wait(self) -> Any:
        recorder = self.recorder
        recorder.came[self.at] = recorder.clock()
        arrived = self.handle.wait()
        recorder.waited[self.at] = recorder.clock()
        return arrived


def futures(handle: Any) -> Iterator[Any]:
    """The futures of a handle. An exchange thread works in order, so its last task is enough."""
    match handle:
        case Task():
            yield handle.done
        case Arrived(works=several) | Shards(coming=several):
            behind = several[-1:] if several and isinstance(several[-1], Task) else several
            for one in behind:
                yield from futures(one)
        case Works(works=several):
            for one in several:
                yield from futures(one)
        case SumOfPieces(work=work):
            yield from futures(work)
        case dist.Work():
            yield handle.get_future()


def title(instruction: Instruction) -> str:
    """The node of the DAG that an instruction belongs to, or what it does.

    >>> from piper.plan.instructions import Free
    >>> title(Free(("h0", "h1"), waits=(3,)))
    'free    h0, h1'
    """
    return instruction.node or line(
        replace(instruction, waits=()) if instruction.waits else instruction
    )


def merged(step: int, plans: Sequence[Plan], seen: Sequence[tuple[Notes, int]]) -> Trace:
    """One step of all devices on the clock of the first; `seen` has notes and clock offsets.

    It begins when the first device reaches its first instruction.
    """
    zero = beginning(seen)
    spans = {p.device: list(spans_of(*seen[p.device], zero)) for p in plans}
    for (sender, at), (receiver, there) in messages(plans):
        sent, arrived = spans[sender][at], spans[receiver][there]
        if arrived.end < sent.end:
            end = max(sent.start, arrived.end)
            spans[sender][at] = replace(sent, end=end, late=arrived.late)
    return Trace(f"step {step}", MEASURED, {d: tuple(s) for d, s in spans.items()}, step)


def beginning(seen: Sequence[tuple[Notes, int]]) -> int:
    """When the first device reaches its first instruction, on the clock of device 0."""
    return min(notes.issued[0] + offset for notes, offset in seen)


def on_devices(trace: Trace, zero: int, seen: Sequence[tuple[Times, int]]) -> Trace:
    """The same step with GPU times where they are known; `seen` has times and clock offsets."""

    def moved(span: Span, times: Times, offset: int) -> Span:
        if span.at not in times:
            return span
        start, end = ((time + offset - zero) / 1e9 for time in times[span.at])
        return replace(span, start=start, end=end, late=False)

    spans = {
        device: tuple(moved(span, *seen[device]) for span in row)
        for device, row in trace.spans.items()
    }
    return replace(trace, spans=spans)


def spans_of(notes: Notes, offset: int, zero: int) -> Iterator[Span]:
    columns = zip(notes.issued, notes.start, notes.end, notes.late, strict=True)
    for at, (*times, late) in enumerate(columns):
        issued, start, end = ((time + offset - zero) / 1e9 for time in times)
        yield Span(at, issued, start, end, late)


def messages(plans: Sequence[Plan]) -> Iterator[tuple[Event, Event]]:
    """The send and receive of each message, matched in order on their channel."""
    rendezvous = Rendezvous(lambda group: ())
    for plan in plans:
        for at, one in enumerate(plan.instructions):
            channel = one.communicator(plan.device) if isinstance(one, Send | Recv) else None
            met = rendezvous.arrive(channel, (plan.device, at)) if channel else None
            if met:
                yield met[0], met[1]
