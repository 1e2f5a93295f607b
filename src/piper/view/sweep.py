"""Many simulated strategies side by side: a table, and a picture of time against memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import indent
from typing import Any

from piper.sim.estimate import Estimate
from piper.view.costs import size_text
from piper.view.simulated import columns, percent, time_text

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 70, 30, 190, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One combination of a sweep: what was foretold, or why it was refused."""

    settings: Mapping[str, str]
    found: Estimate | None = None
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        told = self.found.to_dict() if self.found else {"refused": self.refused}
        return {"settings": dict(self.settings), **told}


def ranked(rows: Sequence[Row], by: str = "step") -> list[Row]:
    """The best first; what does not fit after what does, what is refused last.

    Steps of different batches are compared by the time of a token.
    """

    def key(row: Row) -> tuple[bool, bool, float]:
        if row.found is None:
            return True, True, 0.0
        time = row.found.seconds / (row.found.tokens or 1)
        return False, not row.found.fits, time if by == "step" else row.found.peak

    return sorted(rows, key=key)


def table(rows: Sequence[Row]) -> str:
    """A line for each combination."""
    names = list(rows[0].settings)
    heads = [*names, "step", "tokens/s", "bubble", "exposed", "peak memory", ""]
    good = [row for row in rows if row.found]
    lines = list(columns([heads, *(cells(row, row.found) for row in good if row.found)]))
    lines += [
        f"{settings_text(row.settings)}: refused\n{indent(row.refused, '    ')}"
        for row in rows
        if not row.found
    ]
    return "\n".join(lines)


def cells(row: Row, found: Estimate) -> list[str]:
    exposed = sum(found.report.exposed.values()) / (found.seconds or 1.0)
    return [
        *row.settings.values(), time_text(found.seconds), f"{found.rate:,.0f}",
        percent(found.report.bubble), percent(exposed), size_text(found.peak),
        "" if found.fits else "does not fit",
    ]  # fmt: skip


def settings_text(settings: Mapping[str, str]) -> str:
    """
    >>> settings_text({"pp": "4", "zero": "2"})
    'pp=4 zero=2'
    """
    return " ".join(f"{name}={value}" for name, value in settings.items())


def plot(rows: Sequence[Row]) -> str:
    """Step time against memory, a point for each combination, coloured by what varies first.

    Points that are filled fit; the line is what a device has.
    """
    good = [(row, row.found) for row in rows if row.found]
    most = max((found.peak / GIB for _, found in good), default=1.0)
    longest = max((found.seconds for _, found in good), default=1.0)
    area = Area(1.1 * longest or 1.0, 1.1 * most or 1.0)
    first = next(iter(rows[0].settings), "") if rows else ""
    kinds = list(dict.fromkeys(row.settings.get(first, "") for row, _ in good))
    colours = {kind: COLOURS[k % len(COLOURS)] for k, kind in enumerate(kinds)}
    drawn = [
        line
        for row, found in good
        for line in point(area, row, found, colours[row.settings.get(first, "")])
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
    )
    room = next((found.memory for _, found in good), None)
    return "\n".join(
        [head, *axes(area), *limit(area, room), *drawn, *legend(first, colours), "</svg>\n"]
    )


@dataclass(frozen=True, slots=True)
class Area:
    """Where values lie in the picture: milliseconds across, GiB up."""

    seconds: float
    gib: float

    def x(self, seconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.seconds, 1)

    def y(self, gib: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * gib / self.gib, 1)


def axes(area: Area) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    right, low = WIDTH - RIGHT, HEIGHT - BOTTOM
    for k in range(6):
        x, y = area.x(area.seconds * k / 5), area.y(area.gib * k / 5)
        yield f'<path d="M{LEFT} {y}H{right}M{x} {TOP}V{low}" stroke="#e4e4e4" fill="none"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{area.gib * k / 5:.3g}</text>'
        words = time_text(area.seconds * k / 5)
        yield f'<text x="{x}" y="{low + 16}" text-anchor="middle">{words}</text>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">time of a step</text>'
    yield f'<text x="{LEFT}" y="{TOP - 12}">peak memory of the fullest device, GiB</text>'


def limit(area: Area, room: float | None) -> Iterator[str]:
    if room is not None and room / GIB < area.gib:
        y = area.y(room / GIB)
        yield f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#c00" stroke-dasharray="6 4"/>'
        yield f'<text x="{WIDTH - RIGHT + 6}" y="{y + 4}" fill="#c00">a device has this</text>'


def point(area: Area, row: Row, found: Estimate, colour: str) -> Iterator[str]:
    x, y = area.x(found.seconds), area.y(found.peak / GIB)
    title = escape(f"{settings_text(row.settings)}: {time_text(found.seconds)}")
    fill = colour if found.fits else "white"
    yield (
        f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2">'
        f"<title>{title}, {size_text(found.peak)}</title></circle>"
    )
    rest = " ".join(list(row.settings.values())[1:])
    yield f'<text x="{x + 8}" y="{y + 4}" font-size="10" fill="#555">{escape(rest)}</text>'


def legend(name: str, colours: Mapping[str, str]) -> Iterator[str]:
    x = WIDTH - RIGHT + 20
    yield f'<text x="{x}" y="{TOP + 4}">{escape(name)}</text>'
    for k, (kind, colour) in enumerate(colours.items()):
        y = TOP + 20 + 18 * k
        yield f'<circle cx="{x + 5}" cy="{y}" r="5" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="{y + 4}">{escape(kind)}</text>'
