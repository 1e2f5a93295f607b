"""The schedule as a grid in the terminal: devices down, time across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.ir.roles import Present, roles
from piper.names import BI, BW, B, Device, F, NodeId
from piper.view.footprint import devices_text

UNITS = {F: 1, B: 2, BI: 1, BW: 1}
COLOURS = {F: "cyan", B: "green", BI: "magenta", BW: "yellow"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One pass of one region on one device, from `start` to `end` in units of a forward."""

    device: Device
    node: Compute
    start: int
    end: int

    @property
    def label(self) -> str:
        """The pass and the microbatch, as in F3."""
        part = self.node.microbatch
        return f"{self.node.phase}{'' if part is None else part}"


def bars(dag: Dag, devices: Sequence[Device] | None = None) -> list[Bar]:
    """When everything runs, if F, BI and BW take one unit each and communication takes none.

    `devices`: those whose bars are returned, at least one of each role. By default all.
    """
    here = Present(dag.devices if devices is None else devices)
    ends: dict[NodeId, int] = {}
    free: dict[Device, int] = {}
    found = []
    for name in dag.sequence:
        node = dag.nodes[name]
        ready = max((ends[before] for before in dag.predecessors(node)), default=0)
        if not isinstance(node, Compute):
            ends[name] = ready
            continue
        placed = here.of(node.devices)
        start = max(ready, *(free.get(device, 0) for device in placed))
        for device in placed:  # several times if it has several replicas
            begin = max(start, free.get(device, 0))
            free[device] = begin + UNITS[node.phase]
            found.append(Bar(device, node, begin, free[device]))
        ends[name] = max(free[device] for device in placed)
    return found


def grid(dag: Dag, width: int | None = None, colour: bool = False) -> str:
    """One line per device, or for several that do the same. A dot is a bubble."""
    known = roles(dag)
    all_bars = bars(dag, known.first)
    several = shares_devices(all_bars)
    labels = {id(bar): text(bar, several) for bar in all_bars}
    cell = max(map(len, labels.values())) + 1
    last = max(bar.end for bar in all_bars)
    rows = {device: [".".ljust(cell)] * last for device in known.first}
    for bar in all_bars:
        cells = rows[bar.device]
        cells[bar.start] = paint(labels[id(bar)].ljust(cell), bar, colour)
        for k in range(bar.start + 1, bar.end):
            cells[k] = paint("-" * (cell - 1) + " ", bar, colour)
    lines: dict[str, list[Device]] = {}
    for device, cells in rows.items():
        lines.setdefault("".join(cells).rstrip(), []).extend(known.devices(device))
    heads = {line: devices_text(sorted(alike)) for line, alike in lines.items()}
    widest = max(map(len, heads.values()))
    found = [f"{head.ljust(widest)}  {line}" for line, head in heads.items()]
    return "\n".join(line if width is None or colour else line[:width] for line in found)


def shares_devices(all_bars: list[Bar]) -> bool:
    regions: dict[Device, set[str]] = {}
    for bar in all_bars:
        regions.setdefault(bar.device, set()).add(bar.node.region)
    return any(len(names) > 1 for names in regions.values())


def text(bar: Bar, several: bool) -> str:
    index = f"{bar.node.tags[0][1]}" if several and bar.node.tags else ""
    return f"{index}{bar.label}"


def paint(cell: str, bar: Bar, colour: bool) -> str:
    code = COLOURS[bar.node.phase]
    return f"[{code}]{cell}[/{code}]" if colour else cell


def summary(dag: Dag) -> str:
    """The length of the step in units of a forward, and the idle fraction."""
    first = roles(dag).first
    all_bars = bars(dag, first)
    last = max(bar.end for bar in all_bars)
    busy = sum(bar.end - bar.start for bar in all_bars)
    idle = 1 - busy / (last * len(first))
    return (
        f"{last} units long, {idle:.0%} idle (F, BI, BW take 1 unit each, communication takes none)"
    )
