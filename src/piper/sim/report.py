"""What a simulated step tells: how long it takes, what is idle and why, and what bounds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.names import COMPUTE, Device
from piper.plan.instructions import Instruction, Plan, Run
from piper.plan.trace import Span
from piper.sim.clock import Simulated
from piper.sim.meeting import START, Event


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device: seconds of its step. The rest is `bubble`: waiting for what others compute."""

    device: Device
    compute: float
    exposed: Mapping[str, float]  # by stream: waiting for messages that are on their way
    bubble: float


@dataclass(frozen=True, slots=True)
class Step:
    """Part of the critical path: what no one could have done earlier."""

    device: Device
    at: int
    start: float
    end: float
    what: str  # of a path: its kind


@dataclass(frozen=True, slots=True)
class Report:
    """A whole step."""

    seconds: float
    devices: tuple[DeviceReport, ...]
    critical: tuple[Step, ...]
    messages: Mapping[str, float]  # by stream: seconds that messages were on their way, all devices

    @property
    def bubble(self) -> float:
        """The idle share of all devices that is not exposed communication."""
        return sum(one.bubble for one in self.devices) / (self.seconds * len(self.devices) or 1.0)

    @property
    def exposed(self) -> dict[str, float]:
        """By stream: seconds that devices wait for messages, on average."""
        found: Counter[str] = Counter()
        for one in self.devices:
            found.update(one.exposed)
        return {stream: seconds / len(self.devices) for stream, seconds in found.items()}

    @property
    def bounds(self) -> dict[str, float]:
        """What the critical path consists of, in seconds: compute, or messages of a stream."""
        found: Counter[str] = Counter()
        for step in self.critical:
            found[step.what] += step.end - step.start
        return dict(found.most_common())


def report(found: Simulated) -> Report:
    devices = tuple(device_report(found, row) for row in range(len(found.plans)))
    path = tuple(critical_path(found))
    return Report(found.seconds, devices, path, moving(found))


def device_report(found: Simulated, row: int) -> DeviceReport:
    plan, causes = found.plans[row], found.causes[row]
    spans = found.trace.spans[plan.device]
    exposed: Counter[str] = Counter()
    busy = free = 0.0
    for span in spans:
        if plan.instructions[span.at].stream != COMPUTE:
            continue
        if span.start > free:
            waited = causes[span.at]
            if waited is not START and waited[0] == row:
                exposed.update(part_on_the_way(plan, spans[waited[1]], free, span.start))
        busy += span.end - span.start
        free = max(free, span.end)
    bubble = found.seconds - busy - exposed.total()
    return DeviceReport(plan.device, busy, dict(exposed), max(0.0, bubble))


def part_on_the_way(plan: Plan, message: Span, begin: float, end: float) -> dict[str, float]:
    """How long a message was on its way while compute stood still."""
    one = plan.instructions[message.at]
    seconds = min(end, message.end) - max(begin, message.start)
    return {one.stream: seconds} if one.stream != COMPUTE and seconds > 0 else {}


def moving(found: Simulated) -> dict[str, float]:
    total: Counter[str] = Counter()
    for plan in found.plans:
        for span, one in zip(found.trace.spans[plan.device], plan.instructions, strict=True):
            if one.stream != COMPUTE:
                total[one.stream] += span.end - span.start
    return dict(total)


def critical_path(found: Simulated) -> Iterator[Step]:
    """From the end of the step backwards: what each thing waited for last."""
    event: Event = last_event(found)
    seen: set[Event] = set()
    while event != START and event not in seen:
        seen.add(event)
        row, at = event
        plan = found.plans[row]
        span = found.trace.spans[plan.device][at]
        if span.end > span.start:
            yield Step(plan.device, at, span.start, span.end, kind_of(plan.instructions[at]))
        event = found.causes[row][at]


def last_event(found: Simulated) -> Event:
    ends: list[tuple[float, Event]] = []
    for row, plan in enumerate(found.plans):
        spans: Sequence[Span] = found.trace.spans[plan.device]
        if spans:
            last = max(spans, key=lambda span: span.end)
            ends.append((last.end, (row, last.at)))
    return max(ends)[1] if ends else START


def kind_of(one: Instruction) -> str:
    if one.stream == COMPUTE:
        return str(one.phase) if isinstance(one, Run) else type(one).__name__.lower()
    return f"{one.stream} ({type(one).__name__.lower()})"
