"""Lower bounds of a schedule: its step time with free communication, and the bytes it sends."""

from __future__ import annotations

from piper.names import BI, BW, B, F, Phase
from piper.strategies.schedules.table import Table, ranks_of

SECONDS = {F: 1.0, B: 2.0, BI: 1.0, BW: 1.0}


def makespan(table: Table, forward: float) -> float:
    """Step time with free communication, given the seconds of a stage's forward."""
    last, ends = table.stages - 1, {}
    rows = [[action for slot in row for action in slot] for row in table.rows]
    clock, at = [0.0] * len(rows), [0] * len(rows)
    while any(k < len(row) for k, row in zip(at, rows, strict=True)):
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row):
                stage, phase, part = row[at[r]]
                need = needs(stage, phase, last)
                if any((s, p, part) not in ends for s, p in need):
                    break
                start = max([clock[r], *(ends[s, p, part] for s, p in need)])
                clock[r] = start + forward * SECONDS[phase]
                back = BI if phase is B else phase
                ends[stage, back, part] = clock[r]
                at[r], moved = at[r] + 1, True
        assert moved, "this table waits for itself"
    return max(clock)


def needs(stage: int, phase: Phase, last: int) -> list[tuple[int, Phase]]:
    if phase is F:
        return [(stage - 1, F)] if stage else []
    if phase is BW:
        return [(stage, BI)]
    return [(stage, F), *([(stage + 1, BI)] if stage < last else [])]


def stage_bytes(table: Table, nbytes: int) -> int:
    """Bytes that the busiest rank sends to other stages."""
    rank, sent = ranks_of(table), [0] * len(table.rows)
    for stage in range(table.stages - 1):
        if rank[stage] != rank[stage + 1]:
            sent[rank[stage]] += table.microbatches * nbytes
            sent[rank[stage + 1]] += table.microbatches * nbytes
    return max(sent)
