"""A step as a picture for papers, to scale: SVG, or PNG if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from piper.errors import StrategyError
from piper.names import COMPUTE
from piper.plan.analyse.trace import Trace
from piper.view.kinds import KINDS, colour, ink
from piper.view.reports.overlap import time_text
from piper.view.trace_bars import Bar, bars
from piper.view.view_data import ViewData

WIDTH, LEFT, TOP, HIGH, LOW, SPACE, FOOT, LINE = 960, 84, 8, 22, 8, 8, 46, 18
LETTER = 6.4  # pixels
ROWS = 3  # of messages that are in flight at once on one stream

Box = tuple[float, float, float, float]  # x, y, width, height


def svg(data: ViewData, trace: Trace | None = None, width: int = WIDTH) -> str:
    """The compute of every device, and a thin row below it for each stream."""
    drawing = Drawing(data, trace or data.traces[0], width)
    return "\n".join(drawing.lines())


def png(data: ViewData, path: Path, trace: Trace | None = None, width: int = WIDTH) -> None:
    """The same picture in pixels."""
    require_matplotlib(path)
    paint(Drawing(data, trace or data.traces[0], width), path)


def require_matplotlib(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise StrategyError.of(
            str(path),
            "a PNG needs matplotlib, which is not installed",
            "pip install matplotlib, or use --svg FILE, which needs nothing",
        )


class Drawing:
    """The positions of everything. Times are scaled to the width."""

    def __init__(self, data: ViewData, trace: Trace, width: int) -> None:
        self.bars, self.width, self.data = bars(data, trace), width, data
        self.seconds = max((bar.end for bar in self.bars), default=1.0)
        self.scale = (width - LEFT - 10) / self.seconds
        self.rows: dict[tuple[int, str, int], float] = {}
        self.devices: dict[int, float] = {}
        y = float(TOP)
        for one in data.devices:
            own = [bar for bar in self.bars if bar.device == one.device]
            y = self.place(one.device, own, y)
        self.foot_y = y
        self.height = y + FOOT + LINE * max((row for _, row, _, _ in self.legend()), default=0)

    def place(self, device: int, own: Sequence[Bar], y: float) -> float:
        """Place the rows of a device. Returns where the next device begins."""
        self.devices[device] = self.rows[device, COMPUTE, 0] = y
        y += HIGH + 2
        seen = {(bar.stream, min(bar.track, ROWS - 1)) for bar in own if bar.stream != COMPUTE}
        for stream in sorted({stream for stream, _ in seen}):
            for row in range(sum(1 for name, _ in seen if name == stream)):
                self.rows[device, stream, row] = y
                y += LOW + 1
        return y + SPACE

    def box(self, bar: Bar) -> Box:
        y = self.rows[bar.device, bar.stream, min(bar.track, ROWS - 1)]
        wide = max(0.6, (bar.end - bar.start) * self.scale - 0.6)
        return LEFT + bar.start * self.scale, y, wide, HIGH if bar.stream == COMPUTE else LOW

    def names(self) -> Iterator[tuple[float, float, str, str]]:
        """Labels on the left: x, y, text, and whether it is small."""
        for device, y in self.devices.items():
            yield 6, y + 15, f"device {device}", ""
        for (_, stream, row), y in self.rows.items():
            if stream != COMPUTE and not row:
                yield LEFT - 6, y + 7, self.data.label(stream), "small"
            elif stream in self.data.streams:
                yield LEFT - 6, y + HIGH, self.data.label(stream), "small"

    def lines(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
            f'height="{self.height:g}" viewBox="0 0 {self.width} {self.height:g}" '
            'font-family="sans-serif" font-size="11">'
        )
        yield f'<rect width="{self.width}" height="{self.height:g}" fill="white"/>'
        for y in self.devices.values():
            yield rect((LEFT, y, self.seconds * self.scale, HIGH), "#e9ecf0")
        for x, y, text, small in self.names():
            style = ' text-anchor="end" font-size="8" fill="#666"' if small else ""
            yield f'<text x="{x}" y="{y:g}"{style}>{escape(text)}</text>'
        for bar in self.bars:
            yield from bar_lines(bar, self.box(bar))
        yield from self.foot()
        yield "</svg>\n"

    def foot(self) -> Iterator[str]:
        """The time scale and the legend."""
        y = self.foot_y + 12
        yield (
            f'<text x="{LEFT}" y="{y:g}" fill="#666">0</text><text x="{self.width - 10}" y="{y:g}" '
            f'text-anchor="end" fill="#666">{time_text(self.seconds)}</text>'
        )
        for x, row, fill, text in self.legend():
            y = self.foot_y + 26 + row * LINE
            yield rect((x, y, 12, 10), fill)
            yield f'<text x="{x + 16:g}" y="{y + 9:g}">{text}</text>'

    def legend(self) -> Iterator[tuple[float, int, str, str]]:
        """x, line, colour and text of each kind that is shown."""
        x, row, used = float(LEFT), 0, {bar.kind for bar in self.bars}
        for kind, (text, fill) in KINDS.items():
            wide = 28 + LETTER * len(text)
            if kind not in used:
                continue
            if x + wide > self.width:
                x, row = float(LEFT), row + 1
            yield x, row, fill, text
            x += wide


def bar_lines(bar: Bar, box: Box) -> Iterator[str]:
    x, y, width, height = box
    title = f"<title>{escape(bar.text)}</title>"
    yield rect(box, colour(bar.kind), title)
    if fits(bar, box):
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}" '
            f'text-anchor="middle" fill="{ink(colour(bar.kind))}">{bar.label}</text>'
        )


def fits(bar: Bar, box: Box) -> bool:
    return bar.stream == COMPUTE and LETTER * len(bar.label) < box[2]


def rect(box: Box, fill: str, inside: str = "") -> str:
    x, y, width, height = box
    size = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return (
        f'<rect {size} fill="{fill}">{inside}</rect>' if inside else f'<rect {size} fill="{fill}"/>'
    )


def paint(drawing: Drawing, path: Path) -> None:
    """Draw with matplotlib, at the same positions."""
    from matplotlib.figure import Figure

    size = (drawing.width / 100, drawing.height / 100)
    figure = Figure(figsize=size, dpi=200)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.set_axis_off()
    for y in drawing.devices.values():
        axes.broken_barh([(LEFT, drawing.seconds * drawing.scale)], (y, HIGH), color="#e9ecf0")
    for x, y, text, small in drawing.names():
        axes.text(x, y, text, fontsize=5 if small else 7, ha="right" if small else "left")
    for bar in drawing.bars:
        x, y, width, height = drawing.box(bar)
        axes.broken_barh([(x, width)], (y, height), color=colour(bar.kind))
        if fits(bar, (x, y, width, height)):
            axes.text(x + width / 2, y + 15, bar.label, fontsize=6.5, ha="center")
    for x, row, fill, text in drawing.legend():
        y = drawing.foot_y + 26 + row * LINE
        axes.broken_barh([(x, 12)], (y, 10), color=fill)
        axes.text(x + 16, y + 9, text, fontsize=7)
    axes.text(LEFT, drawing.foot_y + 12, f"0 to {time_text(drawing.seconds)}", fontsize=7)
    figure.savefig(path)
