"""The report of a simulated step, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.names import TOTALS_STREAM, Device, amount
from piper.plan.instructions import Instruction, Run, Total, Update
from piper.sim.clock import Simulated
from piper.sim.prediction import Prediction
from piper.sim.report import Report
from piper.view.reports.bounds import advice, bound
from piper.view.reports.footprint import devices_text, size_text
from piper.view.reports.units import percent, time_text

SHOWN = 4  # longest instructions
ROWS = 16  # devices in the table
MEANING = {TOTALS_STREAM: " (all-reduce of loss and norm)"}
SMALL = 0.01  # shares of time below it are shown with more digits
MOSTLY = 0.5  # of the step: exposed communication that says more of the model than of the strategy


def text(found: Prediction, step: Simulated, machine: str = "") -> str:
    """The whole report."""
    parts = [headline(found), *reached(found), *streams(found.report), memory(found)]
    parts += [by_kind(found), *found.notes, bound(found.report, found.stages), advice(found)]
    parts += [f"simulated on {machine}"] if machine else []
    return "\n".join([*parts, *longest(step), "", *table(found)])


def headline(found: Prediction) -> str:
    rate = f", {found.rate:,.0f} {found.unit}/s" if found.size else ""
    count = sum(map(len, found.alike.values()))
    step = f"step {time_text(found.seconds)} on {amount(count, 'device')}"
    return f"{step}{rate}; {idle_text(found.report)}"


def idle_text(found: Report) -> str:
    """How much of the time devices compute nothing, and why. Rounded parts add up to the whole."""
    exposed = found.idle - found.bubble
    if exposed >= SMALL and found.bubble >= SMALL:
        exposed = round(found.idle, 2) - round(found.bubble, 2)
    parts = f"{percent(found.bubble)} bubble, {percent(exposed)} exposed communication"
    return f"idle {percent(found.idle)} ({parts})"


def waits_text(found: Report) -> str:
    """Where devices mostly wait for messages: how little they compute. Elsewhere, nothing.

    >>> from piper.sim.report import DeviceReport
    >>> waits_text(Report(1e-3, (DeviceReport(0, 1e-4, {"pp": 8e-4}, 1e-4),), (), {}))
    '  a device computes 100 us and waits 800 us for messages: the model is too small to hide them'
    """
    exposed = sum(found.exposed.values())
    if exposed <= MOSTLY * found.seconds:
        return ""
    compute = sum(one.compute for one in found.devices) / len(found.devices)
    times = f"computes {time_text(compute)} and waits {time_text(exposed)} for messages"
    return f"  a device {times}: the model is too small to hide them"


def reached(found: Prediction) -> Iterator[str]:
    """What a device reaches, as far as it is known."""
    rates = [f"{found.device_rate:,.0f} {found.unit}/s"] if found.size else []
    if found.mfu is not None:
        rates.append(f"MFU {percent(found.mfu)}")
    if rates:
        yield f"per device {', '.join(rates)}"


def by_kind(found: Prediction) -> str:
    """What holds the memory of the fullest device at its peak."""
    held = sorted(found.peaks[found.fullest].held.items(), key=lambda part: -part[1])
    return "  " + ", ".join(f"{what} {size_text(size)}" for what, size in held if size)


def streams(found: Report) -> Iterator[str]:
    """The exposed communication of each stream."""
    for stream in sorted(found.messages):
        seconds = found.exposed.get(stream, 0.0)
        share = found.uncovered[stream] if seconds else 0.0
        yield (
            f"  {stream:9} exposed {time_text(seconds)} per device, "
            f"{percent(share)} of its communication{MEANING.get(stream, '')}"
        )


def memory(found: Prediction) -> str:
    """The devices that are fullest, and whether it fits."""
    full = found.fullest
    text = f"peak memory {size_text(found.peaks[full].total)} on {devices_text(found.alike[full])}"
    if host := found.peaks[full].host:
        text += f", and {size_text(host)} of the host"
    known = found.room(full)
    if known is None:
        return text
    room = size_text(known)
    if found.fits:
        return f"{text}: fits in {room}"
    return (
        f"{text}: does NOT fit in {room}; "
        f"`piper check --memory {known / 2**30:.0f}` shows what would fit"
    )


def longest(step: Simulated) -> Iterator[str]:
    """The longest instructions, each kind once."""
    found: dict[str, tuple[float, Device]] = {}
    for plan in step.plans:
        for span in step.trace.spans[plan.device]:
            what = task(plan.instructions[span.at])
            seconds = span.end - span.start
            if seconds > found.get(what, (0.0, 0))[0]:
                found[what] = (seconds, plan.device)
    rows = sorted(found.items(), key=lambda row: -row[1][0])[:SHOWN]
    if rows:
        yield "longest instructions, once each:"
    for what, (seconds, device) in rows:
        yield f"  {time_text(seconds):>9}  {what} on device {device}"


def task(one: Instruction) -> str:
    """What an instruction does, for any microbatch."""
    match one:
        case Run():
            return f"run {one.region}:{one.phase}"
        case Update():
            return f"update {one.bucket}"
        case Total():
            return "all-reduce of loss and norm"
        case _:
            return f"{one.kind} on {one.stream}"


def table(found: Prediction) -> Iterator[str]:
    """A line for each device, or for several with the same numbers."""
    names = sorted(found.report.messages)
    heads = ["devices", "compute", *(f"exposed {name}" for name in names), "bubble", "peak memory"]
    lines: dict[tuple[str, ...], list[Device]] = {}
    for one in found.report.devices:
        exposed = [time_text(one.exposed.get(name, 0.0)) for name in names]
        peak = size_text(found.peaks[one.device].total)
        cells = (time_text(one.compute), *exposed, time_text(one.bubble), peak)
        lines.setdefault(cells, []).extend(found.alike[one.device])
    rows = [[devices_text(sorted(alike)), *cells] for cells, alike in lines.items()]
    yield from columns([heads, *rows[:ROWS]])
    if len(rows) > ROWS:
        yield f"and {amount(len(rows) - ROWS, 'more line')}: --json writes all of them"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """
    >>> list(columns([["a", "long"], ["bbb", "1"]]))
    ['a    long', 'bbb     1']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        rest = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *rest]).rstrip()
