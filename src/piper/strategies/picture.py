"""A strategy as a picture: what notebooks show for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from piper.directives import Place, Strategy
from piper.errors import StrategyError
from piper.names import BI, BW, B, F, amount
from piper.strategies.dataflow import need, whole
from piper.strategies.export import to_table
from piper.strategies.table import Action, Table, cell

UNITS = {F: 1, B: 2, BI: 1, BW: 1}
FILL = {F: "#8ecae6", B: "#90be6d", BI: "#f9c74f", BW: "#f8961e"}  # as in `piper show --svg`
WORDS = {F: "forward", B: "backward", BI: "input gradients", BW: "weight gradients"}
UNIT, ROW, LEFT, FOOT = 34, 30, 80, 34


class Bar(NamedTuple):
    """An action on a rank, from `start` on, in units of a forward."""

    rank: int
    action: Action
    start: int

    @property
    def end(self) -> int:
        return self.start + UNITS[self.action.phase]


def html(strategy: Strategy) -> str:
    """The schedule, if the strategy orders a pipeline, and its directives below it."""
    lines = f"<pre>{escape(str(strategy))}</pre>"
    count = f"<summary>{amount(len(strategy), 'directive')}</summary>"
    picture = svg(strategy)
    if picture is None:
        return f"<div>{lines}</div>"
    shown = f'<div style="overflow-x: auto">{picture}</div>'
    return f"<div>{shown}<details>{count}{lines}</details></div>"


def svg(strategy: Strategy) -> str | None:
    """One row per rank of the pipeline, time across. None if there is no schedule to draw."""
    try:
        table = to_table(strategy)
    except StrategyError:
        return None
    if runs_both_ways(strategy):
        return None
    found = bars(table)
    width = LEFT + UNIT * max(bar.end for bar in found) + 10
    height = ROW * len(table.rows) + FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    )
    parts = (rows(strategy, table, width), boxes(table, found), legend(found, height))
    return "\n".join([head, *(line for part in parts for line in part), "</svg>"])


def runs_both_ways(strategy: Strategy) -> bool:
    """Whether replicas share devices in opposite directions, as in DualPipe: a row has one."""
    places = {one.devices for one in strategy if isinstance(one, Place)}
    return len({tuple(sorted(devices)) for devices in places}) < len(places)


def bars(table: Table) -> list[Bar]:
    """When everything runs, if F, BI and BW take one unit each and messages take none."""
    rows = [[action for slot in row for action in slot] for row in table.rows]
    done: dict[Action, int] = {}  # when it ends
    free, following, found = [0] * len(rows), [0] * len(rows), []
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while following[rank] < len(row):
                action = row[following[rank]]
                needed = need(action, table.stages - 1)
                if needed is not None and needed not in done:
                    break
                start = max(free[rank], 0 if needed is None else done[needed])
                found.append(Bar(rank, action, start))
                done[whole(action)] = free[rank] = found[-1].end
                following[rank] += 1
                moved = True
    return found


def rows(strategy: Strategy, table: Table, width: int) -> Iterator[str]:
    yield f'<rect width="{width}" height="100%" fill="white"/>'
    places = {one.devices for one in strategy if isinstance(one, Place)}
    labels = [devices_text(devices) for devices in sorted(places, key=min)]
    for rank in range(len(table.rows)):
        y, size = 6 + rank * ROW, f'width="{width - LEFT - 10}" height="{ROW - 4}"'
        label = labels[rank] if len(labels) == len(table.rows) else f"rank {rank}"
        yield f'<rect x="{LEFT}" y="{y}" {size} fill="#eee"/>'
        yield f'<text x="6" y="{y + 17}">{label}</text>'


def devices_text(devices: Sequence[int]) -> str:
    """
    >>> devices_text((1,)), devices_text((0, 2)), devices_text((0, 2, 4, 6))
    ('device 1', 'dev. 0, 2', 'dev. 0 (+3)')
    """
    if len(devices) > 2:
        return f"dev. {devices[0]} (+{len(devices) - 1})"
    return f"dev. {devices[0]}, {devices[1]}" if len(devices) == 2 else f"device {devices[0]}"


def boxes(table: Table, found: list[Bar]) -> Iterator[str]:
    one_stage = len(table.rows) == table.stages
    for rank, action, start in found:
        x, y, width = LEFT + start * UNIT, 6 + rank * ROW, UNITS[action.phase] * UNIT
        label = cell(action, one_stage)
        yield (
            f'<rect x="{x}" y="{y}" width="{width - 1}" height="{ROW - 4}" rx="3" '
            f'fill="{FILL[action.phase]}"><title>{WORDS[action.phase]} of stage {action.stage}, '
            f"microbatch {action.microbatch}</title></rect>"
            f'<text x="{x + width / 2}" y="{y + 17}" text-anchor="middle">{label}</text>'
        )


def legend(found: list[Bar], height: int) -> Iterator[str]:
    used = [phase for phase in WORDS if any(bar.action.phase is phase for bar in found)]
    for k, phase in enumerate(used):
        x, y = LEFT + 130 * k, height - 20
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{FILL[phase]}"/>'
        yield f'<text x="{x + 20}" y="{y + 12}">{WORDS[phase]}</text>'
