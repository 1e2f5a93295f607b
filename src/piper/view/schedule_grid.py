"""The schedule as a grid in the terminal: devices down, time across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.ir.by_device.schedule_rows import OVERLAP, STEPS, Cell, Rows, idle, label, length
from piper.names import BI, BW, B, Device, F, Phase, amount
from piper.view.kinds import colour, ink, word
from piper.view.reports.footprint import devices_text

TALL = 24  # lines of a block in a terminal
BLOCKS = 4  # in a terminal
Line = tuple[str, Sequence[Cell]]  # the devices, and what they do


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a schedule to draw, and where it has to fit."""

    width: int | None = None  # columns of a terminal; None: all in one line, and nothing is cut
    steps: tuple[int, int] | None = None  # the first time step, and how many
    devices: frozenset[Device] | None = None
    painted: bool = False  # with the markup of rich


WHOLE = Window()


def grid(rows: Rows, window: Window = WHOLE) -> str:
    """One line for each device, or for several that do the same. A dot is an idle time step.

    A schedule that is wider than the window is continued in a block of lines below.
    """
    lines, more = shortened(lines_of(rows, window), window)
    size = max((needed(cell) for _, row in lines for cell in row), default=2)
    head = max((len(name) for name, _ in lines), default=0)
    all_blocks = blocks(rows, window, max(1, (window.width or 0) - head - 1) // size or 1, size)
    shown = all_blocks if window.width is None or window.steps else all_blocks[:BLOCKS]
    found = []
    for begin, end in shown:
        if len(all_blocks) > 1 or window.steps is not None:
            found.append(f"time steps {begin} to {end - 1}")
        found += [drawn(head, line, size, (begin, end), window.painted) for line in lines]
        if more:
            found.insert(len(found) - TALL // 2, more)
    if len(shown) < len(all_blocks):
        begin, end = all_blocks[len(shown)]
        next_part = f"--steps {begin}:{end - begin} shows the next part"
        found.append(f"... {next_part} of {length(rows)} time steps")
    return "\n".join(found)


def blocks(rows: Rows, window: Window, most: int, size: int) -> list[tuple[int, int]]:
    """The time steps of each block, at most `most` of them."""
    begin, last = span(rows, window)
    found = []
    while begin < last:
        end = last if window.width is None else min(last, begin + most)
        near = range(end, max(begin, end - 3), -1)
        end = next((one for one in near if not cuts_a_label(rows, size, one)), end)
        found.append((begin, end))
        begin = end
    return found


def cuts_a_label(rows: Rows, size: int, step: int) -> bool:
    cells = (cell for row in rows.values() for cell in row if cell.start < step < cell.end)
    return any(len(cell.label) >= (step - cell.start) * size for cell in cells)


def lines_of(rows: Rows, window: Window) -> list[Line]:
    """Devices that do the same share a line."""
    alike: dict[tuple[Cell, ...], list[Device]] = {}
    for devices, row in rows.items():
        chosen = [d for d in devices if window.devices is None or d in window.devices]
        if chosen:
            alike.setdefault(tuple(same(row)), []).extend(chosen)
    return [(devices_text(sorted(some)), row) for row, some in alike.items()]


def same(row: Sequence[Cell]) -> Iterator[Cell]:
    """Without the names of nodes, which differ."""
    return (Cell(one.start, one.end, one.labels, one.phases) for one in row)


def shortened(lines: list[Line], window: Window) -> tuple[list[Line], str]:
    """The first and the last lines if there are many, and a line that stands for the others."""
    if window.width is None or window.devices is not None or len(lines) <= TALL:
        return lines, ""
    half = TALL // 2
    left_out = amount(len(lines) - TALL, "more line")
    return lines[:half] + lines[-half:], f"... {left_out}: --devices {half}-{2 * half} shows some"


def span(rows: Rows, window: Window) -> tuple[int, int]:
    """The first time step, and the one after the last."""
    last = length(rows)
    if window.steps is None:
        return 0, last
    first, count = window.steps
    return min(first, last), min(first + count, last)


def needed(cell: Cell) -> int:
    """Columns of a time step, so that the label fits, with a space after it."""
    return max(2, -(-(len(cell.label) + 1) // cell.steps))


def drawn(head: int, line: Line, size: int, block: tuple[int, int], painted: bool) -> str:
    name, row = line
    text = "".join(pieces(row, size, block, painted))
    return f"{name.ljust(head)}  {text}".rstrip()


def pieces(row: Sequence[Cell], size: int, block: tuple[int, int], painted: bool) -> Iterator[str]:
    """The text of a block. Cells that began before it go on in it."""
    first, end = block
    time = first
    for cell in sorted(row, key=lambda cell: cell.start):
        if cell.end <= first or cell.start >= end:
            continue
        yield ".".ljust(size) * (cell.start - time)
        begin, to = max(cell.start, first), min(cell.end, end)
        for text, phase in parts_of(cell, size, begin, to):
            yield paint(text, phase) if painted and text else text
        time = to
    yield ".".ljust(size) * (end - time)


def parts_of(cell: Cell, size: int, begin: int, end: int) -> Iterator[tuple[str, Phase | None]]:
    """The text of a cell in a block, by pass. Its label is in the first block with room for it.

    >>> long, short = Cell(0, 2, ("B0",), (B,)), Cell(0, 1, ("F0",), (F,))
    >>> [text for text, _ in parts_of(long, 3, 0, 2)], [text for text, _ in parts_of(long, 3, 1, 2)]
    (['B0 --', ' '], ['--', ' '])
    >>> [text for text, _ in parts_of(short, 5, 0, 1)]
    ['F0  ', ' ']
    """
    room, before = size * (end - begin), size * (begin - cell.start)
    shown = before <= len(cell.label) < room
    *first, last = cell.labels if shown else ("",)
    *phases, phase = cell.phases
    for name, own in zip(first, phases, strict=False):
        yield f"{name}{OVERLAP}", own
    space = " " if end == cell.end else ""
    rest = room - (len(cell.label) if shown else 0) - len(space)
    fill = (" " if shown else "").ljust(rest, "-" if cell.steps > 1 else " ")
    yield f"{last}{fill[:rest]}", phase
    yield space, None


def paint(text: str, phase: Phase | None) -> str:
    """With the markup of rich."""
    if phase is None:
        return text
    fill = colour(phase)
    return f"[{ink(fill)} on {fill}]{text}[/]"


def summary(rows: Rows, machine: bool = False) -> str:
    """How long a step is in these units.

    Without a machine, also how long devices are idle. With one, the simulator knows it better.
    """
    waits = "" if machine else f", idle {100 * idle(rows):.0f} %"
    drawn = "drawn in " if machine else ""
    others = "; not comparable with time steps of a stage" if unit(rows) else ""
    return (
        f"{drawn}{amount(length(rows), 'time step')}{waits}: {', '.join(lengths(rows))}, "
        f"communication takes none{others}"
    )


def lengths(rows: Rows) -> Iterator[str]:
    """How long the phases that occur take."""
    seen = {phase for row in rows.values() for cell in row for phase in cell.phases}
    short = [str(phase) for phase in (F, BI, BW) if phase in seen]
    if short:
        names = " and ".join([", ".join(short[:-1]), short[-1]] if short[:-1] else short)
        yield f"{names}{unit(rows)} {'take 1 each' if len(short) > 1 else 'takes 1'}"
    if B in seen:
        yield "B takes 2"


def unit(rows: Rows) -> str:
    """The layers that take one time step, if stages have different numbers of them."""
    cells = [cell for row in rows.values() for cell in row if cell.nodes]
    long = [cell for cell in cells if cell.steps > STEPS[cell.phases[0]]]
    if not long:
        return ""
    layers = len(long[0].nodes) * STEPS[long[0].phases[0]] // long[0].steps
    return f" of {layers} layers" if layers > 1 else " of a layer"


def legend(rows: Rows) -> str:
    """What the letters and signs of a grid mean, those that it has."""
    cells = [cell for row in rows.values() for cell in row]
    phases = [p for p in (B, BI, BW) if any(p in cell.phases for cell in cells)]
    signs = {
        OVERLAP: any(len(cell.labels) > 1 for cell in cells),
        "--": any(cell.steps > 1 for cell in cells),
        ".": idle(rows) > 0,
    }
    meant = {OVERLAP: "may overlap", "--": "still running", ".": "idle"}
    words = [f"{phase} {word(phase)}" for phase in phases]
    return "; ".join(
        [example(cells), *words, *(f"{k} {meant[k]}" for k, used in signs.items() if used)]
    )


def example(cells: Sequence[Cell]) -> str:
    """
    >>> example([Cell(0, 1, ("3F12",), (F,))]), example([Cell(0, 1, ("F",), (F,))])
    ('1F0 stage 1, forward, microbatch 0', 'F forward')
    """
    staged = any(not cell.label.startswith(cell.phases[0]) for cell in cells)
    split = any(cell.label != cell.phases[0] for cell in cells)
    name = label(1 if staged else None, F, 0 if split else None)
    return f"{name} {'stage 1, ' if staged else ''}{word(F)}{', microbatch 0' if split else ''}"
