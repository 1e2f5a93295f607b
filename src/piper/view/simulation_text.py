"""The report of a simulated step, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.names import Device, amount
from piper.plan.instructions import Instruction, Run, Update
from piper.sim.clock import Simulated
from piper.sim.prediction import Prediction
from piper.sim.report import HOST, Report
from piper.view.footprint import devices_text, size_text

SHOWN = 4  # parts of the critical path, and longest instructions
ROWS = 16  # devices in the table


def text(found: Prediction, step: Simulated, machine: str = "") -> str:
    """The whole report."""
    parts = [headline(found), *reached(found), *streams(found.report), memory(found)]
    parts += [by_kind(found), *found.notes, bound(found.report), advice(found)]
    parts += [f"simulated on {machine}"] if machine else []
    return "\n".join([*parts, *longest(step), "", *table(found)])


def headline(found: Prediction) -> str:
    tokens = f", {found.rate:,.0f} tokens/s" if found.tokens else ""
    count = sum(map(len, found.alike.values()))
    step = f"step {time_text(found.seconds)} on {amount(count, 'device')}"
    return f"{step}{tokens}; {idle_text(found.report)}"


def idle_text(found: Report) -> str:
    """How much of the time devices compute nothing, and why."""
    exposed = found.idle - found.bubble
    parts = f"{percent(found.bubble)} bubble, {percent(exposed)} exposed communication"
    return f"idle {percent(found.idle)} ({parts})"


def reached(found: Prediction) -> Iterator[str]:
    """What a device reaches, as far as it is known."""
    rates = [f"{found.device_rate:,.0f} tokens/s"] if found.tokens else []
    if found.mfu is not None:
        rates.append(f"MFU {percent(found.mfu)}")
    if rates:
        yield f"per device {', '.join(rates)}"


def advice(found: Prediction) -> str:
    """One line: what bounds the step most, and what usually helps."""
    report = found.report
    exposed = {stream: seconds / report.seconds for stream, seconds in report.exposed.items()}
    worst = max(exposed, key=lambda stream: exposed[stream], default="")
    if not found.fits:
        return "advice: it does not fit; recompute (`remat=`), use a higher `zero`, or more devices"
    if worst and exposed[worst] > max(0.1, report.bubble):
        return (
            f"advice: messages on {worst} bound the step; send less or overlap more: larger "
            "microbatches, a schedule that overlaps, or a faster network"
        )
    if report.bubble > 0.1:
        return (
            "advice: the bubble bounds the step; use more microbatches, an interleaved or "
            "zero-bubble schedule, or stages cut by measured costs"
        )
    return "advice: compute bounds the step; compiled=True, larger microbatches or lower precision"


def by_kind(found: Prediction) -> str:
    """What holds the memory of the fullest device at its peak."""
    held = sorted(found.peaks[found.fullest].held.items(), key=lambda part: -part[1])
    return "  " + ", ".join(f"{what} {size_text(size)}" for what, size in held if size)


def streams(found: Report) -> Iterator[str]:
    """The exposed communication of each stream."""
    for stream in sorted(found.messages):
        seconds = found.exposed.get(stream, 0.0)
        yield (
            f"  {stream:9} exposed {time_text(seconds)} per device, "
            f"{percent(found.uncovered[stream])} of its communication"
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


def bound(found: Report) -> str:
    """The parts of the critical path. Phases of one region and device are combined.

    >>> from piper.sim.report import Step
    >>> steps = (Step(1, 0, 2.0, 3.0, "pp"), Step(0, 0, 0.0, 2.0, "F", "PP0"))
    >>> bound(Report(3.0, (), steps, {}))
    'bound by 67 % F of PP0 on device 0, 33 % messages on pp'
    """
    grouped: dict[tuple[Device | None, str], tuple[list[str], float]] = {}
    for (device, region, what), seconds in found.bounds.items():
        key = (device, region) if region else (None, what)
        names, before = grouped.get(key, ([], 0.0))
        grouped[key] = ([*names, what], before + seconds)
    rows = sorted(grouped.items(), key=lambda row: -row[1][1])
    whole = found.seconds or 1.0
    parts = [f"{percent(s / whole)} {part_text(*key, names)}" for key, (names, s) in rows[:SHOWN]]
    rest = sum(seconds for _, (_, seconds) in rows[SHOWN:])
    if rest > whole / 1000:
        parts.append(f"{percent(rest / whole)} others")
    return "bound by " + ", ".join(parts)


def part_text(device: Device | None, name: str, phases: Sequence[str]) -> str:
    if device is not None:
        return f"{' and '.join(sorted(phases, reverse=True))} of {name} on device {device}"
    if name == HOST:
        return "hosts starting messages"
    return f"the optimizer ({name})" if name in ("update", "add") else f"messages on {name}"


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
    for what, (seconds, device) in rows:
        yield f"  {time_text(seconds):>9}  {what} on device {device}"


def task(one: Instruction) -> str:
    """What an instruction does, for any microbatch."""
    match one:
        case Run():
            return f"run {one.region}:{one.phase}"
        case Update():
            return f"update {one.bucket}"
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


def percent(fraction: float) -> str:
    """
    >>> percent(0.1234), percent(0.004), percent(0.0)
    ('12 %', '0.4 %', '0 %')
    """
    return f"{100 * fraction:.{1 if 0 < fraction < 0.01 else 0}f} %"


def time_text(seconds: float) -> str:
    """
    >>> time_text(12.3), time_text(0.0123), time_text(4e-6), time_text(0.0)
    ('12.30 s', '12.3 ms', '4 us', '0')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.1f} ms"
    return f"{1e6 * seconds:.0f} us" if seconds else "0"
