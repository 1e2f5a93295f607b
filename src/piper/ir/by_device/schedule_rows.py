"""A schedule in time steps: what each device does, and when, if communication takes no time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from piper.ir.by_device.roles import Present, Roles, roles
from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.names import BI, BW, B, Device, F, NodeId, Phase

OVERLAP = "&"  # joins passes that may overlap
STEPS = {F: 1, B: 2, BI: 1, BW: 1}  # time steps of a pass


@dataclass(frozen=True, slots=True)
class Cell:
    """One pass on one device, or several that overlap, from time step `start` to `end`."""

    start: int
    end: int
    labels: tuple[str, ...]
    phases: tuple[Phase, ...]
    nodes: tuple[NodeId, ...] = ()  # of a DAG

    @property
    def label(self) -> str:
        return OVERLAP.join(self.labels)

    @property
    def steps(self) -> int:
        return self.end - self.start


Rows = Mapping[tuple[Device, ...], Sequence[Cell]]  # for each group of devices that do the same


def label(stage: int | None, phase: Phase, microbatch: int | None) -> str:
    """Stage, pass and microbatch. The stage is left out where devices have only one.

    >>> label(3, BI, 0), label(None, F, 12), label(None, B, None)
    ('3BI0', 'F12', 'B')
    """
    parts = (stage, phase, microbatch)
    return "".join(str(part) for part in parts if part is not None)


def dag_rows(dag: Dag, known: Roles | None = None) -> Rows:
    """When the passes of a DAG run. By default, one row for each role."""
    known = known or roles(dag)
    cells: dict[Device, list[Cell]] = {device: [] for device in known.first}
    stages: dict[Device, set[int | None]] = {device: set() for device in known.first}
    found = list(passes(dag, known.first))
    for device, node, _ in found:
        stages[device].add(stage_of(node))
    several = any(len(numbers) > 1 for numbers in stages.values())
    for device, node, start in found:
        text = label(stage_of(node) if several else None, node.phase, node.microbatch)
        end = start + STEPS[node.phase]
        cells[device].append(Cell(start, end, (text,), (node.phase,), (node.id,)))
    rows = {tuple(sorted(known.devices(one))): list(joined(row)) for one, row in cells.items()}
    return in_largest_steps(rows)


def in_largest_steps(rows: Rows) -> Rows:
    """If all stages have two layers, a time step is that of two layers."""
    cells = [cell for row in rows.values() for cell in row]
    step = gcd(*(time for cell in cells for time in (cell.start, cell.end))) or 1
    return {
        devices: [replace(one, start=one.start // step, end=one.end // step) for one in row]
        for devices, row in rows.items()
    }


def stage_of(node: Compute) -> int | None:
    return node.tags[0][1] if node.tags else None


def joined(row: Iterable[Cell]) -> Iterator[Cell]:
    """The regions of one stage, such as its layers, that follow each other are one cell."""
    last: Cell | None = None
    for cell in row:
        if last and is_next(cell, last):
            last = replace(last, end=cell.end, nodes=last.nodes + cell.nodes)
            continue
        if last:
            yield last
        last = cell
    if last:
        yield last


def is_next(cell: Cell, last: Cell) -> bool:
    """Another region of the stage. The same region again is another replica of it."""
    other = cell.nodes[0] not in last.nodes
    return other and last.labels == cell.labels and last.end == cell.start


def passes(dag: Dag, devices: Sequence[Device]) -> Iterator[tuple[Device, Compute, int]]:
    """Each pass on each of these devices, and when it starts."""
    here = Present(devices)
    ends: dict[NodeId, int] = {}
    free: dict[Device, int] = {}
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
            free[device] = begin + STEPS[node.phase]
            yield device, node, begin
        ends[name] = max(free[device] for device in placed)


def length(rows: Rows) -> int:
    """Time steps until everything is done."""
    return max((cell.end for row in rows.values() for cell in row), default=0)


def idle(rows: Rows) -> float:
    """The part of the time in which devices have nothing to do."""
    busy = sum(len(some) * sum(c.steps for c in row) for some, row in rows.items())
    whole = length(rows) * sum(map(len, rows))
    return 1 - busy / whole if whole else 0.0
