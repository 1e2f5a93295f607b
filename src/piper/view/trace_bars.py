"""What a trace shows of a story, as bars: the one thing that files and pictures for papers draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from piper.names import COMPUTE, Device
from piper.plan.analyse.trace import Span, Trace
from piper.view.view_data import DeviceView, ViewData

SILENT = ("load", "keep", "free")  # take no time worth a bar


@dataclass(frozen=True, slots=True)
class Bar:
    """One instruction in time; `row` keeps apart what overlaps on one stream of one device."""

    device: Device
    stream: str
    row: int
    at: int
    kind: str
    node: int  # in the story's columns, or -1
    text: str
    start: float
    end: float
    label: str  # short: F3, or 1F3 where a device has several stages


def bars(story: ViewData, trace: Trace) -> list[Bar]:
    """By device, then by start; times since the step began."""
    begin = min((s.issued for spans in trace.spans.values() for s in spans), default=0.0)
    return [
        bar
        for one in story.devices
        for bar in apart(sorted(raw(story, one, trace, begin), key=lambda bar: (bar.start, bar.at)))
    ]


def raw(story: ViewData, one: DeviceView, trace: Trace, begin: float) -> Iterator[Bar]:
    columns = one.instructions
    several = has_several_stages(story, one)
    for span in trace.spans.get(one.device, ()):
        kind, node = columns["kind"][span.at], columns["node"][span.at]
        if kind in SILENT or span.end <= span.start:
            continue
        yield Bar(
            one.device,
            columns["stream"][span.at],
            0,
            span.at,
            kind,
            node,
            columns["text"][span.at],
            *moved(span, begin),
            label(story, node, kind, several),
        )


def moved(span: Span, begin: float) -> tuple[float, float]:
    return span.start - begin, span.end - begin


def apart(found: list[Bar]) -> Iterator[Bar]:
    """Each bar in the first row of its stream that is free; compute has only one."""
    ends: dict[str, list[float]] = {}
    for bar in found:
        rows = ends.setdefault(bar.stream, [])
        free = (k for k, end in enumerate(rows) if end <= bar.start + 1e-12)
        row = next(free, len(rows)) if bar.stream != COMPUTE else 0
        rows[row : row + 1] = [bar.end]
        yield replace(bar, row=row)


def has_several_stages(story: ViewData, one: DeviceView) -> bool:
    phases, stages = story.nodes["phase"], story.nodes["stage"]
    nodes = (node for node in one.instructions["node"] if node >= 0 and phases[node])
    return len({stages[node] for node in nodes}) > 1


def label(story: ViewData, node: int, kind: str, several: bool) -> str:
    if node < 0 or not story.nodes["phase"][node]:
        return kind
    nodes = story.nodes
    stage = nodes["stage"][node] if several else ""
    return f"{stage}{nodes['phase'][node]}{nodes['microbatch'][node]}"
