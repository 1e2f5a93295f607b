"""The bars of a trace, for pictures and for Chrome traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from piper.names import COMPUTE, Device
from piper.plan.analyse.trace import Span, Trace
from piper.view.view_data import DeviceView, ViewData

UPDATE = "update"  # shown even if nobody measured how long it takes
SILENT = ("load", "keep", "free")  # too short for a bar


@dataclass(frozen=True, slots=True)
class Bar:
    """One instruction in time. Bars that overlap on a stream have different tracks."""

    device: Device
    stream: str
    track: int
    at: int
    kind: str
    node: int  # index in the node columns, or -1
    text: str
    start: float
    end: float
    label: str  # short: F3, or 1F3 where a device has several stages


def bars(data: ViewData, trace: Trace) -> list[Bar]:
    """Sorted by device and start. Times are since the start of the step."""
    begin = min((s.issued for spans in trace.spans.values() for s in spans), default=0.0)
    return [
        bar
        for one in data.devices
        for bar in apart(sorted(raw(data, one, trace, begin), key=lambda bar: (bar.start, bar.at)))
    ]


def raw(data: ViewData, one: DeviceView, trace: Trace, begin: float) -> Iterator[Bar]:
    columns = one.instructions
    several = has_several_stages(data, one)
    for span in trace.spans.get(one.device, ()):
        kind, node = columns["kind"][span.at], columns["node"][span.at]
        if kind in SILENT or (span.end <= span.start and kind != UPDATE):
            continue
        yield Bar(
            one.device,
            columns["stream"][span.at],
            0,
            span.at,
            kind,
            node,
            columns["text"][span.at],
            *since(span, begin),
            label(data, node, kind, several),
        )


def since(span: Span, begin: float) -> tuple[float, float]:
    return span.start - begin, span.end - begin


def apart(found: list[Bar]) -> Iterator[Bar]:
    """Put each bar on the first free track of its stream. Compute has only one track."""
    ends: dict[str, list[float]] = {}
    for bar in found:
        tracks = ends.setdefault(bar.stream, [])
        free = (k for k, end in enumerate(tracks) if end <= bar.start + 1e-12)
        track = next(free, len(tracks)) if bar.stream != COMPUTE else 0
        tracks[track : track + 1] = [bar.end]
        yield replace(bar, track=track)


def has_several_stages(data: ViewData, one: DeviceView) -> bool:
    phases, stages = data.nodes["phase"], data.nodes["stage"]
    nodes = (node for node in one.instructions["node"] if node >= 0 and phases[node])
    return len({stages[node] for node in nodes}) > 1


def label(data: ViewData, node: int, kind: str, several: bool) -> str:
    if node < 0 or not data.nodes["phase"][node]:
        return kind
    nodes = data.nodes
    stage = nodes["stage"][node] if several else ""
    return f"{stage}{nodes['phase'][node]}{nodes['microbatch'][node]}"
