"""The report of a simulated step: its time, idle time and the reasons, and the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from piper.names import COMPUTE, Device
from piper.plan.analyse.trace import Span
from piper.plan.instructions import Instruction, Run, Send
from piper.sim.clock import Simulated
from piper.sim.message_queue import START, Event

HOST = "host"  # part of the critical path in which a host starts messages


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Seconds of a step on one device. `bubble` is time spent waiting for compute elsewhere."""

    device: Device
    compute: float
    exposed: Mapping[str, float]  # by stream: waiting for messages in flight
    bubble: float


@dataclass(frozen=True, slots=True)
class Step:
    """Part of the critical path: it could not have started earlier."""

    device: Device
    at: int
    start: float
    end: float
    what: str  # phase or kind of a computation, stream of a message, or `host`
    region: str = ""  # empty if it runs no region


@dataclass(frozen=True, slots=True)
class Report:
    """A whole step."""

    seconds: float
    devices: tuple[DeviceReport, ...]
    critical: tuple[Step, ...]  # from the end of the step to its beginning
    messages: Mapping[str, float]  # by stream: seconds with messages in flight, all devices

    @property
    def bubble(self) -> float:
        """The fraction of idle time on all devices, without exposed communication."""
        return sum(one.bubble for one in self.devices) / (self.seconds * len(self.devices) or 1.0)

    @property
    def idle(self) -> float:
        """The fraction of the time of all devices in which they compute nothing.

        It is the bubble and the exposed communication together.
        """
        waiting = sum(self.exposed.values()) / self.seconds if self.seconds else 0.0
        return self.bubble + waiting

    @property
    def exposed(self) -> dict[str, float]:
        """By stream: seconds that devices wait for messages, on average."""
        found: dict[str, float] = {}
        for one in self.devices:
            add_up(found, one.exposed)
        return {stream: seconds / len(self.devices) for stream, seconds in found.items()}

    @property
    def uncovered(self) -> dict[str, float]:
        """By stream: the fraction of communication time that is exposed. The rest is hidden."""
        count = len(self.devices)
        return {
            stream: self.exposed.get(stream, 0.0) * count / seconds if seconds else 0.0
            for stream, seconds in self.messages.items()
        }

    @property
    def bounds(self) -> dict[tuple[Device | None, str, str], float]:
        """The parts of the critical path in seconds, the largest first.

        By device, region and phase for computation; by stream alone for messages.
        """
        found: dict[tuple[Device | None, str, str], float] = {}
        for step in self.critical:
            key = (step.device if step.region else None, step.region, step.what)
            found[key] = found.get(key, 0.0) + step.end - step.start
        return dict(sorted(found.items(), key=lambda part: -part[1]))


def report(found: Simulated) -> Report:
    devices = tuple(device_report(found, index) for index in range(len(found.plans)))
    path = tuple(critical_path(found))
    return Report(found.seconds, devices, path, moving(found))


def device_report(found: Simulated, index: int) -> DeviceReport:
    plan, causes = found.plans[index], found.causes[index]
    exposed: dict[str, float] = {}
    busy = free = 0.0
    for span in found.trace.spans[plan.device]:
        if plan.instructions[span.at].stream != COMPUTE:
            continue
        if span.start > free:
            add_up(exposed, waited(found, causes[span.at], free, span.start))
        busy += span.end - span.start
        free = max(free, span.end)
    add_up(exposed, waited_at_end(found, index, free))
    bubble = found.seconds - busy - sum(exposed.values())
    return DeviceReport(plan.device, busy, exposed, max(0.0, bubble))


def waited_at_end(found: Simulated, index: int, free: float) -> dict[str, float]:
    """By stream: how long messages to a device are in flight after its last computation.

    Those that it sends are not waited for.
    """
    plan = found.plans[index]
    ends = [
        (span.end, span.at)
        for span in found.trace.spans[plan.device]
        if is_awaited(plan.instructions[span.at])
    ]
    end, at = max(ends, default=(0.0, 0))
    return waited(found, (index, at), free, end)


def is_awaited(one: Instruction) -> bool:
    return one.stream != COMPUTE and not isinstance(one, Send)


def waited(found: Simulated, event: Event, begin: float, end: float) -> dict[str, float]:
    """By stream: how long messages were in flight while compute was idle.

    Follows the causes back to the last computation.
    """
    seconds: dict[str, float] = {}
    while event != START and end > begin:
        one, span = instruction_and_span(found, event)
        if one.stream == COMPUTE and span.end > span.start:
            break
        length = min(end, span.end) - max(begin, span.start)
        if one.stream != COMPUTE and length > 0:
            add_up(seconds, {one.stream: length})
        end = min(end, span.start)
        event = found.causes[event[0]][event[1]]
    return seconds


def instruction_and_span(found: Simulated, event: Event) -> tuple[Instruction, Span]:
    plan = found.plans[event[0]]
    return plan.instructions[event[1]], found.trace.spans[plan.device][event[1]]


def moving(found: Simulated) -> dict[str, float]:
    """By stream: how long each device had messages in flight. Overlapping ones count once."""
    total: dict[str, float] = {}
    for plan in found.plans:
        spans: dict[str, list[tuple[float, float]]] = {}
        for span, one in zip(found.trace.spans[plan.device], plan.instructions, strict=True):
            if one.stream != COMPUTE:
                spans.setdefault(one.stream, []).append((span.start, span.end))
        add_up(total, {stream: covered(times) for stream, times in spans.items()})
    return total


def add_up(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


def covered(times: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    length, until = 0.0, float("-inf")
    for start, end in sorted(times):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


def critical_path(found: Simulated) -> Iterator[Step]:
    """Follow the causes from the end of the step backwards.

    In gaps between two events, the host was starting messages.
    """
    event, until = last_event(found), found.seconds
    while event != START:
        one, span = instruction_and_span(found, event)
        device = found.plans[event[0]].device
        if span.end < until:
            yield Step(device, event[1], span.end, until, HOST)
        end = min(span.end, until)
        if span.start < end:
            region = one.region if isinstance(one, Run) else ""
            yield Step(device, event[1], span.start, end, kind_of(one), region)
        until = min(until, span.start)
        event = found.causes[event[0]][event[1]]
    if until > 0.0:
        yield Step(found.plans[0].device, 0, 0.0, until, HOST)


def last_event(found: Simulated) -> Event:
    ends = [
        (span.end, (index, span.at))
        for index, plan in enumerate(found.plans)
        for span in found.trace.spans[plan.device]
    ]
    return max(ends)[1] if ends else START


def kind_of(one: Instruction) -> str:
    if one.stream != COMPUTE:
        return one.stream
    return one.kind
