"""Many simulated strategies side by side: a table, and a picture of speed against memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from textwrap import indent
from typing import Any

from piper.sim.prediction import Prediction
from piper.view.reports.footprint import size_text
from piper.view.reports.simulation_text import columns
from piper.view.reports.units import percent, time_text

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 70, 30, 190, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class SweepResult:
    """One combination of a sweep: the prediction, or why it is not supported."""

    settings: Mapping[str, str]
    found: Prediction | None = None
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        result = self.found.to_dict() if self.found else {"refused": self.refused}
        return {"settings": dict(self.settings), **result}


def same_line(results: Sequence[SweepResult]) -> str:
    """What to say of rows that are all the same: the script may not read what was set.

    >>> same_line([SweepResult({"pp": "2"}, None, "no"), SweepResult({"pp": "4"}, None, "no")])
    ''
    """
    if any(one.found is None for one in results):
        return ""
    rows = [{**one.to_dict(), "settings": None} for one in results]
    if len(rows) < 2 or any(one != rows[0] for one in rows):
        return ""
    names = " and ".join(f"--{name}" for name in results[0].settings)
    return f"all rows are the same: does the script read {names}, as with argparse?"


def ranked(results: Sequence[SweepResult], by: str = "step") -> list[SweepResult]:
    """The best first. Those that do not fit come after those that do, unsupported ones last.

    Steps of different batches are compared by the time per token or sample.
    """

    def key(one: SweepResult) -> tuple[bool, bool, float]:
        if one.found is None:
            return True, True, 0.0
        time = one.found.seconds / (one.found.size or 1)
        return False, not one.found.fits, time if by == "step" else one.found.peak

    return sorted(results, key=key)


def table(results: Sequence[SweepResult]) -> str:
    """A line for each combination."""
    names = list(results[0].settings)
    simulated = [one for one in results if one.found]
    heads = [*names, "step", f"{unit(simulated)}/s", "bubble", "exposed", "peak memory", ""]
    lines = list(columns([heads, *(cells(one, one.found) for one in simulated if one.found)]))
    lines += [
        f"{settings_text(one.settings)}: no result\n{indent(one.refused, '    ')}"
        for one in results
        if not one.found
    ]
    return "\n".join([*lines, *note_lines(simulated)])


def unit(simulated: Sequence[SweepResult]) -> str:
    """What the steps of a sweep are measured by."""
    return next((one.found.unit for one in simulated if one.found), "tokens")


def note_lines(results: Sequence[SweepResult]) -> Iterator[str]:
    """Each note once, with its combinations unless it applies to all."""
    notes: dict[str, list[str]] = {}
    for one in results:
        for note in one.found.notes if one.found else ():
            notes.setdefault(note, []).append(settings_text(one.settings))
    for note, some in notes.items():
        yield note if len(some) == len(results) else f"{'; '.join(some)}: {note}"


def cells(one: SweepResult, found: Prediction) -> list[str]:
    exposed = sum(found.report.exposed.values()) / (found.seconds or 1.0)
    return [
        *one.settings.values(), time_text(found.seconds), f"{found.rate:,.0f}",
        percent(found.report.bubble), percent(exposed), size_text(found.peak),
        "" if found.fits else "does not fit",
    ]  # fmt: skip


def settings_text(settings: Mapping[str, str]) -> str:
    """
    >>> settings_text({"pp": "4", "zero": "2"})
    'pp=4 zero=2'
    """
    return " ".join(f"{name}={value}" for name, value in settings.items())


def plot(results: Sequence[SweepResult]) -> str:
    """Tokens or samples per second against memory, one point per combination.

    The first setting gives the colour. Filled points fit. The line is the memory of a device.
    """
    simulated = [(one, one.found) for one in results if one.found]
    rates, sizes = (
        [found.rate for _, found in simulated],
        [found.peak / GIB for _, found in simulated],
    )
    area = Area(around(rates), around(sizes))
    first = next(iter(results[0].settings), "") if results else ""
    kinds = list(dict.fromkeys(one.settings.get(first, "") for one, _ in simulated))
    colours = {kind: COLOURS[k % len(COLOURS)] for k, kind in enumerate(kinds)}
    drawn = [
        line
        for one, found in simulated
        for line in point(area, one, found, colours[one.settings.get(first, "")])
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
    )
    room = next((found.room(found.fullest) for _, found in simulated), None)
    return "\n".join(
        [
            head,
            *axes(area, unit(results)),
            *limit(area, room),
            *drawn,
            *legend(first, colours),
            "</svg>\n",
        ]
    )


Ends = tuple[float, float]


def around(values: Sequence[float]) -> Ends:
    """From a little below the minimum to a little above the maximum.

    >>> around([10.0, 20.0])
    (9.0, 21.0)
    """
    least, most = min(values, default=0.0), max(values, default=1.0)
    margin = (most - least) / 10 or most / 10 or 1.0
    return max(0.0, least - margin), most + margin


def ticks(ends: Ends) -> list[float]:
    """Round numbers between the ends, about five.

    >>> ticks((9.0, 21.0))
    [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    """
    low, high = ends
    step = 10.0 ** floor(log10((high - low) / 5))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= 7)
    return [step * k for k in range(ceil(low / step), floor(high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Area:
    """The scales of the plot: tokens or samples per second on x, GiB on y."""

    rates: Ends
    sizes: Ends

    def x(self, rate: float) -> float:
        low, high = self.rates
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (rate - low) / (high - low), 1)

    def y(self, gib: float) -> float:
        low, high = self.sizes
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (gib - low) / (high - low), 1)


def axes(area: Area, unit: str) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    right, low = WIDTH - RIGHT, HEIGHT - BOTTOM
    for gib in ticks(area.sizes):
        y = area.y(gib)
        yield f'<path d="M{LEFT} {y}H{right}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{gib:.4g}</text>'
    for rate in ticks(area.rates):
        x = area.x(rate)
        yield f'<path d="M{x} {TOP}V{low}" stroke="#e4e4e4"/>'
        yield f'<text x="{x}" y="{low + 16}" text-anchor="middle">{rate:,.0f}</text>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{unit} per second</text>'
    yield f'<text x="{LEFT}" y="{TOP - 12}">peak memory of the fullest device, GiB</text>'


def limit(area: Area, room: float | None) -> Iterator[str]:
    if room is not None and area.sizes[0] < room / GIB < area.sizes[1]:
        y = area.y(room / GIB)
        yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#c00" stroke-dasharray="6 4"/>'
        yield f'<text x="{WIDTH - RIGHT + 6}" y="{y + 4}" fill="#c00">device memory</text>'


def point(area: Area, one: SweepResult, found: Prediction, colour: str) -> Iterator[str]:
    x, y = area.x(found.rate), area.y(found.peak / GIB)
    title = escape(f"{settings_text(one.settings)}: {time_text(found.seconds)}")
    fill = colour if found.fits else "white"
    yield (
        f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2">'
        f"<title>{title}, {size_text(found.peak)}</title></circle>"
    )
    rest = " ".join(list(one.settings.values())[1:])
    yield f'<text x="{x + 8}" y="{y + 4}" font-size="10" fill="#555">{escape(rest)}</text>'


def legend(name: str, colours: Mapping[str, str]) -> Iterator[str]:
    x = WIDTH - RIGHT + 20
    yield f'<text x="{x}" y="{TOP + 4}">{escape(name)}</text>'
    for k, (kind, colour) in enumerate(colours.items()):
        y = TOP + 20 + 18 * k
        yield f'<circle cx="{x + 5}" cy="{y}" r="5" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="{y + 4}">{escape(kind)}</text>'
