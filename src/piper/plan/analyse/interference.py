"""How much longer compute takes while messages are in flight, as seen in recorded steps.

A message needs a part of the device: SMs that wait for its data, or the memory's bandwidth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from piper.names import Device, amount
from piper.plan.analyse.trace import Span, Trace
from piper.plan.instructions import Plan, Run, is_message

MOST = 3  # messages in flight that are told apart; more count as so many
NOISE = 1.05  # times as long, by chance
Pass = tuple[Device, str, str]  # device, region, phase


@dataclass(frozen=True, slots=True)
class Pending:
    """The runs that had so many messages in flight, on average."""

    messages: int
    runs: int
    slowdown: float  # their time over that of the same passes without any


class InFlight:
    """How many messages are in flight on a device, at any time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        found = [(span.start, span.end) for span in spans if span.end > span.start]
        events = sorted([(start, 1) for start, _ in found] + [(end, -1) for _, end in found])
        self.times = [time for time, _ in events]
        self.counts = list(accumulate(change for _, change in events))
        steps = zip(pairwise(self.times), self.counts, strict=False)
        areas = [(after - before) * count for (before, after), count in steps]
        self.areas = list(accumulate(areas, initial=0.0))

    def until(self, time: float) -> float:
        """The sum over all messages of how long they were in flight before a time."""
        k = bisect_right(self.times, time) - 1
        return self.areas[k] + (time - self.times[k]) * self.counts[k] if k >= 0 else 0.0

    def average(self, span: Span) -> float:
        """During a span that is not empty."""
        return (self.until(span.end) - self.until(span.start)) / (span.end - span.start)


def interference(plans: Sequence[Plan], traces: Iterable[Trace]) -> tuple[Pending, ...]:
    """Compares runs of the same pass of the same device, with and without messages in flight."""
    seen: dict[Pass, dict[int, list[float]]] = {}
    for trace in traces:
        for plan in plans:
            for key, messages, seconds in timed(plan, trace.spans.get(plan.device, ())):
                seen.setdefault(key, {}).setdefault(messages, []).append(seconds)
    found = []
    for messages in range(1, MOST + 1):
        pairs = [(one[messages], one[0]) for one in seen.values() if 0 in one and messages in one]
        alone = sum(len(beside) * sum(free) / len(free) for beside, free in pairs)
        if alone:
            beside = sum(sum(times) for times, _ in pairs)
            runs = sum(len(times) for times, _ in pairs)
            found.append(Pending(messages, runs, beside / alone))
    return tuple(found)


def timed(plan: Plan, spans: Sequence[Span]) -> Iterator[tuple[Pass, int, float]]:
    """The runs of a device: pass, messages in flight, seconds.

    Runs beside a message whose end is not known are left out.
    """
    code = plan.instructions
    messages = [span for span in spans if is_message(code[span.at])]
    known = InFlight(span for span in messages if not span.late)
    unknown = InFlight(span for span in messages if span.late)
    for span in spans:
        one = code[span.at]
        if isinstance(one, Run) and span.end > span.start and not unknown.average(span):
            level = min(MOST, round(known.average(span)))
            yield (plan.device, one.region, one.phase), level, span.end - span.start


def interference_text(found: Sequence[Pending]) -> str:
    """One sentence, or nothing where messages slow nothing down, or no pass was seen both ways.

    >>> interference_text([Pending(1, 12, 1.204), Pending(3, 4, 1.5)])
    'compute takes 1.20x as long with 1 message in flight (12 runs), 1.50x with 3 or more (4 runs)'
    """
    parts: list[str] = []
    if all(one.slowdown < NOISE for one in found):
        return ""
    for one in (each for each in found if each.slowdown >= 1):  # no message makes compute faster
        count = f"{one.messages}{' or more' if one.messages == MOST else ''}"
        noun = "message" if one.messages == 1 else "messages"
        words = f"with {count}" if parts else f"as long with {count} {noun} in flight"
        parts.append(f"{one.slowdown:.2f}x {words} ({amount(one.runs, 'run')})")
    return f"compute takes {', '.join(parts)}" if parts else ""
