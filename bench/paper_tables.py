"""Tables of the paper's evaluation, from the raw results of its pieces."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]
Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Text, and what is drawn beside it: a bar for each name."""

    head: Row
    rows: tuple[Row, ...]
    bars: tuple[tuple[str, float], ...]
    unit: str  # of the bars


def times(found: Mapping[str, float]) -> str:
    return f"{found['median']:.3f}x [{found['low']:.3f}, {found['high']:.3f}]"


def entries(results: Results, group: str) -> dict[str, Any]:
    return dict(results[group]["entries"])


def schedules(results: Results) -> Table:
    """Steps of one of Piper's schedules, and of all others beside it."""
    settings = results["ep"]["settings"]
    size, mine = settings["size"], settings["ours"]
    parts = settings["microbatches"] or size["microbatches"]
    tokens = parts * size["rows"] * size["length"] * settings["world"] // 2  # PP=2
    pairs = {
        name: ratio
        for name, one in entries(results, "ep").items()
        for ratio in one.get("ratios", {}).values()
    }
    own = statistics.median(one["ours_ms"] for one in pairs.values())
    speeds = {mine: 1e3 * tokens / own}
    speeds |= {name: 1e3 * tokens / one["theirs_ms"] for name, one in pairs.items()}
    rows = [(mine, f"{own:.1f} ms", f"{speeds[mine]:,.0f}", "")]
    rows += [
        (name, f"{one['theirs_ms']:.1f} ms", f"{speeds[name]:,.0f}", times(one))
        for name, one in pairs.items()
    ]
    head = ("schedule", "step", "tokens/s", f"time of {mine} over it")
    return Table(head, tuple(rows), tuple(speeds.items()), "tokens/s")


def zero(results: Results) -> Table:
    rows, bars = [], []
    for entry, one in entries(results, "dp").items():
        for name, ratio in one.get("ratios", {}).items():
            ours, peer = name.split(" / ")
            mine, theirs = f"{ratio['ours_ms']:.1f} ms", f"{ratio['theirs_ms']:.1f} ms"
            rows.append((entry, ours, mine, peer, theirs, times(ratio)))
            bars.append((f"{entry}: {name}", ratio["median"]))
    head = ("level", "", "step", "peer", "its step", "ratio")
    return Table(head, tuple(rows), tuple(bars), "of the peer's time")


def peers(results: Results) -> Table:
    """Step times and peak memory of Piper and of a peer."""
    rows, bars = [], []
    for group, found in results.items():
        for entry, one in found["entries"].items():
            for name, ratio in one.get("ratios", {}).items():
                ours, peer = name.split(" / ")
                mine, theirs = (step(one, *pair) for pair in sides(ours, peer, ratio))
                differ = ", losses differ" if peer in one["unequal"] else ""
                rows.append((group, entry, peer + differ, mine, theirs, times(ratio)))
                bars.append((f"{group}: {entry}, {peer}", ratio["median"]))
    head = ("group", "", "peer", "Piper", "peer's", "ratio")
    return Table(head, tuple(rows), tuple(bars), "of the peer's time")


def sides(ours: str, peer: str, ratio: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    yield ours, ratio["ours_ms"]
    yield peer, ratio["theirs_ms"]


def step(entry: Results, name: str, ms: float) -> str:
    peaks = entry.get("peak_gib", {}).get(name)
    return f"{ms:.1f} ms" + (f", {max(peaks):.2f} GiB" if peaks else "")


def batch(results: Results) -> Table:
    rows, bars = [], []
    for name, one in entries(results, "memory").items():
        if "rows" not in one:
            rows.append((name, "failed", "", ""))
            continue
        fits = one["seen"].get(str(one["rows"]), {})
        computed = f"{fits['computed'] / 2**20:.1f} MiB" if fits.get("computed") else ""
        measured = f"{fits['peak'] / 2**20:.1f} MiB" if fits else ""
        rows.append((name, str(one["rows"]), measured, computed))
        bars.append((name, float(one["rows"])))
    head = ("strategy", "rows of a microbatch that fit", "measured", "computed before the run")
    return Table(head, tuple(rows), tuple(bars), "rows")


def streams(results: Results) -> Table:
    rows, bars = [], []
    for name, one in results["ways"].items():
        slowed = (f"{p['slowdown']:.2f}x beside {p['messages']}" for p in one["slowdown"])
        rows.append((name, f"{one['ms']:.1f} ms", ", ".join(slowed)))
        bars.append((name, one["ms"]))
    head = ("messages", "step", "compute, by messages in flight")
    return Table(head, tuple(rows), tuple(bars), "ms")


def scaling(results: Results) -> Table:
    rows, bars = [], []
    for kind, found in results.items():
        for one in found:
            speed = 1e3 * one["tokens"] / one["ms"] / one["devices"]
            first = found[0]
            alike = one.get("alone_ms") or first["ms"] * (
                one["tokens"] / one["devices"] / (first["tokens"] / first["devices"])
            )
            share = alike / one["ms"]
            text = f"{one['ms']:,.1f} ms", f"{speed:,.0f}", f"{share:.1%}"
            rows.append((kind, str(one["devices"]), *text))
            bars.append((f"{one['devices']} devices, {kind}", 100 * share))
    head = ("", "devices", "step", "tokens/s of a device", "of the speed without messages")
    return Table(head, tuple(rows), tuple(bars), "%")


def overhead(results: Results) -> Table:
    rows, bars = [], []
    for name, one in entries(results, "host").items():
        if "us_per_instruction" in one:
            each = one["us_per_instruction"]
            rows.append((name, str(one["instructions"]), f"{each:.2f} us", ""))
            bars.append((name, each))
            continue
        found = one["seconds"].get("piper")
        if found:
            each = 1e6 * statistics.median(found) / one["instructions"]
            ratios = ", ".join(map(times, one["ratios"].values()))
            rows.append((name, str(one["instructions"]), f"{each:.2f} us", ratios))
            bars.append((name, each))
    head = ("", "instructions", "time of each", "step over torch's")
    return Table(head, tuple(rows), tuple(bars), "us per instruction")


def compiling(results: Results) -> Table:
    def lines() -> Iterator[tuple[Row, tuple[str, float]]]:
        for name, one in results.items():
            schedule = name.split()[0]
            each = 1e6 * one["seconds"] / one["nodes"]
            row = (schedule, f"{one['nodes']:,}", f"{one['seconds']:.2f} s", f"{each:.0f} us")
            yield row, (f"{schedule}, {one['nodes']:,} nodes", each)

    rows, bars = zip(*lines(), strict=True)
    return Table(("schedule", "nodes", "compile and check", "per node"), rows, bars, "us per node")


TABLES: dict[str, Callable[[Results], Table]] = {
    "schedules": schedules,
    "zero": zero,
    "peers": peers,
    "batch": batch,
    "streams": streams,
    "scaling": scaling,
    "overhead": overhead,
    "compile": compiling,
}
