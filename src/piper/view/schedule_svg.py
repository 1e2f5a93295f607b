"""The schedule as a picture for papers and pages: devices down, time across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from piper.ir.by_device.schedule_rows import STEPS, Cell, Rows, length
from piper.names import BI, BW, B, Device, F, Phase
from piper.view.kinds import colour, ink, word

UNIT, ROW, LEFT, LETTER = 34, 30, 70, 9.6
MANY = 64  # rows; above that, one is drawn for all devices that do the same


def svg(rows: Rows) -> str:
    """One row per device, or per role if there are very many devices. Gaps are bubbles."""
    lines = [(name, row) for devices, row in rows.items() for name in names(rows, devices)]
    lines = sorted(lines, key=lambda line: line[0])
    boxes = [box for _, row in lines for cell in row for box in boxes_of(cell)]
    unit = max([UNIT, *(LETTER * len(label) / steps for label, _, steps in boxes)])
    width = round(max(LEFT + unit * length(rows) + 10, LEFT + 150 * len(phases(rows))))
    height = ROW * len(lines) + 44
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    )
    drawn = [head, f'<rect width="{width}" height="100%" fill="white"/>']
    for k, ((_, text), row) in enumerate(lines):
        drawn += line(6 + k * ROW, text, row, unit, length(rows))
    return "\n".join([*drawn, *legend(rows, height), "</svg>\n"])


def names(rows: Rows, devices: Sequence[Device]) -> Iterator[tuple[Device, str]]:
    """The names of the lines of a group of devices, each with the device that sorts it."""
    if sum(map(len, rows)) <= MANY:
        yield from ((device, f"device {device}") for device in devices)
    else:
        more = f" (+{len(devices) - 1})" if len(devices) > 1 else ""
        yield devices[0], f"{devices[0]}{more}" if more else f"device {devices[0]}"


def line(y: int, name: str, row: Sequence[Cell], unit: float, last: int) -> Iterator[str]:
    yield f'<rect x="{LEFT}" y="{y}" width="{last * unit:g}" height="{ROW - 4}" fill="#eee"/>'
    yield f'<text x="6" y="{y + 17}">{name}</text>'
    for cell in row:
        yield f"<g><title>{escape(', '.join(cell.nodes) or cell.label)}</title>"
        x = LEFT + cell.start * unit
        for label, phase, steps in boxes_of(cell):
            size = f'width="{steps * unit - 1:g}" height="{ROW - 4}"'
            yield f'<rect x="{x:g}" y="{y}" {size} rx="3" fill="{colour(phase)}"/>'
            place = f'x="{x + steps * unit / 2:g}" y="{y + 17}" text-anchor="middle"'
            yield f'<text {place} fill="{ink(colour(phase))}">{escape(label)}</text>'
            x += steps * unit
        yield "</g>"


def boxes_of(cell: Cell) -> Iterator[tuple[str, Phase, float]]:
    """Each pass of a cell: its label, its phase, and its time steps."""
    longer = cell.steps / sum(STEPS[phase] for phase in cell.phases)  # layers make a pass longer
    for label, phase in zip(cell.labels, cell.phases, strict=True):
        yield label, phase, longer * STEPS[phase]


def phases(rows: Rows) -> list[str]:
    used = {phase for row in rows.values() for cell in row for phase in cell.phases}
    return [phase for phase in (F, B, BI, BW) if phase in used]


def legend(rows: Rows, height: int) -> Iterator[str]:
    for k, phase in enumerate(phases(rows)):
        x, y = LEFT + 150 * k, height - 24
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour(phase)}"/>'
        yield f'<text x="{x + 20}" y="{y + 12}">{word(phase)}</text>'
