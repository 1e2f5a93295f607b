"""A schedule in time steps: what each device does, and when, if communication takes no time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.ir.roles import Present, Roles, roles
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
    about: str = ""  # the name of its node

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
    regions: dict[Device, set[str]] = {device: set() for device in known.first}
    found = list(passes(dag, known.first))
    for device, node, _ in found:
        regions[device].add(node.region)
    several = any(len(names) > 1 for names in regions.values())
    for device, node, start in found:
        stage = node.tags[0][1] if several and node.tags else None
        text = label(stage, node.phase, node.microbatch)
        end = start + STEPS[node.phase]
        cells[device].append(Cell(start, end, (text,), (node.phase,), node.id))
    return {tuple(sorted(known.devices(device))): row for device, row in cells.items()}


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
