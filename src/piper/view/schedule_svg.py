"""The schedule as a picture for papers and pages: devices down, time across."""

from __future__ import annotations

from collections.abc import Iterator

from piper.ir.dag import Dag
from piper.ir.roles import Roles, own_roles, roles
from piper.names import BI, BW, B, F
from piper.view.schedule_grid import Bar, bars, shares_devices, text

FILL = {F: "#8ecae6", B: "#90be6d", BI: "#f9c74f", BW: "#f8961e"}
UNIT, ROW, LEFT = 34, 30, 70
MANY = 64  # devices; above that, one of each role is drawn


def svg(dag: Dag) -> str:
    """One row per device, or per role if there are very many devices. Gaps are bubbles."""
    known = own_roles(dag.devices) if len(dag.devices) <= MANY else roles(dag)
    found = bars(dag, known.first)
    width = LEFT + UNIT * max(bar.end for bar in found) + 10
    height = ROW * len(known.first) + 44
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join(
        [head, *rows(known, width), *boxes(known, found), *legend(dag, height), "</svg>\n"]
    )


def rows(known: Roles, width: int) -> Iterator[str]:
    yield f'<rect width="{width}" height="100%" fill="white"/>'
    more = len(known.rows) - 1
    for row, device in enumerate(known.first):
        y = 6 + row * ROW
        size = f'width="{width - LEFT - 10}" height="{ROW - 4}"'
        yield f'<rect x="{LEFT}" y="{y}" {size} fill="#eee"/>'
        label = f"{device} (+{more})" if more else f"device {device}"
        yield f'<text x="6" y="{y + 17}">{label}</text>'


def boxes(known: Roles, found: list[Bar]) -> Iterator[str]:
    several = shares_devices(found)
    row = {device: k for k, device in enumerate(known.first)}
    for bar in found:
        x, y = LEFT + bar.start * UNIT, 6 + row[bar.device] * ROW
        width = (bar.end - bar.start) * UNIT
        yield (
            f'<rect x="{x}" y="{y}" width="{width - 1}" height="{ROW - 4}" rx="3" '
            f'fill="{FILL[bar.node.phase]}"><title>{bar.node.id}</title></rect>'
            f'<text x="{x + width / 2}" y="{y + 17}" text-anchor="middle">'
            f"{text(bar, several)}</text>"
        )


def legend(dag: Dag, height: int) -> Iterator[str]:
    words = {F: "forward", B: "backward", BI: "input gradients", BW: "weight gradients"}
    used = dict.fromkeys(node.phase for node in dag.computes)
    for k, phase in enumerate(used):
        x, y = LEFT + 150 * k, height - 24
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{FILL[phase]}"/>'
        yield f'<text x="{x + 20}" y="{y + 12}">{words[phase]}</text>'
