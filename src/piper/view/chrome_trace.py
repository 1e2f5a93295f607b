"""Chrome trace events for Perfetto: a process per device, a thread per stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from piper.names import COMPUTE
from piper.plan.analyse.trace import Trace
from piper.view.trace_bars import Bar, bars
from piper.view.view_data import DeviceView, ViewData

Event = dict[str, Any]
Threads = dict[tuple[int, str, int], int]  # device, stream, track -> thread

MICRO = 1e6
COMMUNICATION = "communication"


def events(data: ViewData) -> list[Event]:
    """All traces, one after the other. Names come first, then all events by time."""
    threads: Threads = {}
    timed: list[Event] = []
    begin = 0.0
    for number, trace in enumerate(data.traces):
        found = bars(data, trace)
        timed += [slice_of(data, bar, threads, begin) for bar in found]
        timed += flows(found, threads, begin, number)
        timed += [one for device in data.devices for one in memory(device, trace, begin)]
        begin += trace.seconds
    return [*names(data, threads), *sorted(timed, key=lambda event: event["ts"])]


def names(data: ViewData, threads: Threads) -> Iterator[Event]:
    for device in sorted({device for device, _, _ in threads}):
        yield meta("process_name", device, 0, name=f"device {device}")
        yield meta("process_sort_index", device, 0, sort_index=device)
    for (device, stream, track), thread in threads.items():
        name = f"{stream} ({track + 1})" if track else data.label(stream)
        yield meta("thread_name", device, thread, name=name)
        yield meta(
            "thread_sort_index", device, thread, sort_index=0 if stream == COMPUTE else thread
        )


def meta(what: str, device: int, thread: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": device, "tid": thread, "args": arguments}


def thread_of(bar: Bar, threads: Threads) -> int:
    return threads.setdefault((bar.device, bar.stream, bar.track), len(threads) + 1)


def slice_of(data: ViewData, bar: Bar, threads: Threads, begin: float) -> Event:
    nodes = data.nodes
    about: Event = {"instruction": bar.at, "plan": bar.text}
    if bar.node >= 0:
        keys = ("region", "maker", "tags", "source", "bytes", "expected")
        about |= {key: nodes[key][bar.node] for key in keys if nodes[key][bar.node]}
    return {
        "ph": "X",
        "name": nodes["id"][bar.node] if bar.node >= 0 else bar.text,
        "cat": bar.kind,
        "pid": bar.device,
        "tid": thread_of(bar, threads),
        "ts": (begin + bar.start) * MICRO,
        "dur": (bar.end - bar.start) * MICRO,
        "args": about,
    }


def flows(found: Iterable[Bar], threads: Threads, begin: float, number: int) -> Iterator[Event]:
    """An arrow from each send to its receive: the same node, replica i to replica i."""
    sends: dict[int, list[Bar]] = {}
    receives: dict[int, list[Bar]] = {}
    for bar in found:
        if bar.kind in ("send", "recv"):
            (sends if bar.kind == "send" else receives).setdefault(bar.node, []).append(bar)
    for node, out in sends.items():
        for k, (a, b) in enumerate(zip(out, receives.get(node, ()), strict=False)):
            name = f"{number}.{node}.{k}"
            yield flow("s", name, a, a.start, threads, begin)
            yield {**flow("f", name, b, max(a.start, b.start), threads, begin), "bp": "e"}


def flow(ph: str, name: str, bar: Bar, time: float, threads: Threads, begin: float) -> Event:
    return {
        "ph": ph,
        "id": name,
        "name": "message",
        "cat": COMMUNICATION,
        "pid": bar.device,
        "tid": thread_of(bar, threads),
        "ts": (begin + min(time, bar.end)) * MICRO,
    }


def memory(one: DeviceView, trace: Trace, begin: float) -> Iterator[Event]:
    """The memory of a device, as a counter for each kind."""
    spans = {span.at: span for span in trace.spans.get(one.device, ())}
    if not spans:
        return
    first = min(span.issued for spans_of in trace.spans.values() for span in spans_of)
    kinds = [kind for kind in one.memory if kind != "at"]
    now = 0.0
    for k, at in enumerate(one.memory["at"]):
        now = max(now, spans[at].issued - first) if at in spans else now
        held = {kind: one.memory[kind][k] for kind in kinds}
        yield {
            "ph": "C",
            "name": "memory",
            "pid": one.device,
            "ts": (begin + now) * MICRO,
            "args": {**one.lasting, **held},
        }
