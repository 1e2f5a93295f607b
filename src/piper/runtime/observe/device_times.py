"""When a GPU ran what the host queued, read from a trace of torch's profiler.

Every instruction of a recorded step runs in a range with the name of its node. A kernel or copy
belongs to the range in which the host launched it.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Times = dict[int, tuple[int, int]]  # by position in the plan: begin and end, in nanoseconds
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


def device_times(path: Path, names: Sequence[str], starts: Sequence[Sequence[int]]) -> list[Times]:
    """The times of each step, from a Chrome trace.

    `names` are the names of the plan's ranges. `starts` are the times at which the host reached
    each of them, step by step. The result is on the same clock as `starts`.
    """
    events = json.loads(path.read_text())["traceEvents"]
    ranges = sorted(ranges_of(events, set(names)), key=lambda e: e["ts"])
    where = placed(ranges, names, len(starts))
    behind = [1e3 * ranges[r]["ts"] - starts[step][k] for r, (step, k) in where.items()]
    if not behind:
        return [{} for _ in starts]
    shift, found = statistics.median(behind), [dict[int, tuple[int, int]]() for _ in starts]
    for r, event in launched(events, ranges):
        if r in where:
            step, k = where[r]
            begin = round(1e3 * event["ts"] - shift)
            end = begin + round(1e3 * event["dur"])
            first, last = found[step].get(k, (begin, end))
            found[step][k] = min(first, begin), max(last, end)
    return found


def ranges_of(events: Iterable[Event], names: set[str]) -> Iterator[Event]:
    return (e for e in events if e.get("cat") == "user_annotation" and e["name"] in names)


def placed(ranges: Sequence[Event], names: Sequence[str], steps: int) -> dict[int, tuple[int, int]]:
    """The step of each range and its position in the plan. Both are in order."""
    seen: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(ranges):
        seen[one["name"]].append(number)
    positions: dict[str, list[int]] = defaultdict(list)
    for k, name in enumerate(names):
        positions[name].append(k)
    return {
        number: (index // len(positions[name]), positions[name][index % len(positions[name])])
        for name, numbers in seen.items()
        for index, number in enumerate(numbers)
        if index < steps * len(positions[name])
    }


def launched(events: Sequence[Event], ranges: Sequence[Event]) -> Iterator[tuple[int, Event]]:
    """Events on the device, with the number of the range that launched each."""
    calls = {e["args"].get("correlation"): e for e in events if e.get("cat") in LAUNCHES}
    threads: dict[Any, list[int]] = defaultdict(list)
    for number, one in enumerate(ranges):
        threads[one["tid"]].append(number)
    begins = {tid: [ranges[r]["ts"] for r in rows] for tid, rows in threads.items()}
    for event in (e for e in events if e.get("cat") in ON_DEVICE):
        call = calls.get(event["args"].get("correlation"))
        if call is not None and call["tid"] in threads:
            at = bisect_right(begins[call["tid"]], call["ts"]) - 1
            if at >= 0:
                number = threads[call["tid"]][at]
                if call["ts"] <= ranges[number]["ts"] + ranges[number]["dur"]:
                    yield number, event
