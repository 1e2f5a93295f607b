"""Which neighbouring runs of a plan can be one call: a *kernel sequence*.

Runs of one phase join if no message starts, arrives or is waited for between them. What a sequence
needs is loaded before it. What lies between its runs without being read by them (sums of gradients,
freed values) is done after it. A sequence ends where gathered parameters are freed: they are large.
The plan itself does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from piper.plan.instructions import (
    Add,
    Buffers,
    Free,
    Gather,
    Keep,
    Load,
    Plan,
    Run,
    Waits,
    is_message,
)

MOST = 8  # runs in a compiled sequence: longer ones take longer to compile and gain little
MOST_EAGER = 64  # in one that is not compiled

Fits = Callable[[Run], bool]  # can a run be part of a sequence?
Source = int | tuple[int, int]  # an argument of the sequence, or a result of one of its runs


@dataclass(frozen=True, slots=True)
class Wiring:
    """How values flow between the runs of a sequence. Equal for all microbatches."""

    reads: tuple[tuple[Source, ...], ...]  # of each run
    results: tuple[tuple[int, int], ...]  # those that are read elsewhere: run, and which of its


@dataclass(frozen=True, slots=True)
class KernelSequence:
    """Runs that are one call."""

    at: tuple[int, ...]  # positions of its runs
    then: tuple[int, ...]  # what is done after it, instead of between its runs
    runs: tuple[Run, ...]
    waits: Waits  # of its first run
    reads: Buffers
    writes: Buffers
    wiring: Wiring


Part = int | KernelSequence  # a position, or several at once


def sequences(plan: Plan, at: Iterable[int], fits: Fits, most: int) -> Iterator[Part]:
    """These instructions of a plan, with up to `most` runs joined where that is possible."""
    joiner = _Joiner(plan, fits, most, users(plan))
    for k in at:
        yield from joiner.take(k)
    yield from joiner.close()


def users(plan: Plan) -> dict[str, list[int]]:
    """For each buffer, the positions of the instructions that read it."""
    found: dict[str, list[int]] = {}
    for k, one in enumerate(plan.instructions):
        for name in one.uses:
            found.setdefault(name, []).append(k)
    return found


@dataclass
class _Joiner:
    plan: Plan
    fits: Fits
    most: int
    users: dict[str, list[int]]
    pending: list[int] = field(default_factory=list)  # runs, and what is done after them
    later: set[str] = field(default_factory=set)  # what those write
    phase: str = ""  # of the pending runs
    regions: set[str] = field(default_factory=set)  # theirs
    frees_parameters: bool = False  # that were gathered

    def __post_init__(self) -> None:
        self.states = {state.value for state in self.plan.states}
        self.gathered = {one.into for one in self.plan.instructions if isinstance(one, Gather)}

    def take(self, k: int) -> Iterator[Part]:
        one = self.plan.instructions[k]
        match one:
            case Load():
                yield k
            case Run() if self.can_join(one):
                if self.pending and not self.continues(one):
                    yield from self.close()
                self.pending.append(k)
                self.phase = one.phase
                self.regions.add(one.region)
            case Free() if self.pending:
                self.pending.append(k)
                if not self.gathered.isdisjoint(one.values):
                    self.frees_parameters = True
            case Keep() | Add() if self.pending and not self.awaited(one.waits):
                self.pending.append(k)
                self.later.add(one.into)
            case _:
                yield from self.close()
                yield k

    def can_join(self, run: Run) -> bool:
        return self.fits(run) and self.states.isdisjoint(run.writes)

    def continues(self, run: Run) -> bool:
        """Whether a run can be part of the pending sequence: of one phase, each region once."""
        new = run.phase == self.phase and run.region not in self.regions
        new = new and not self.frees_parameters
        return new and not self.awaited(run.waits) and self.later.isdisjoint(run.reads)

    def awaited(self, waits: Iterable[int]) -> Waits:
        return tuple(k for k in waits if is_message(self.plan.instructions[k]))

    def close(self) -> Iterator[Part]:
        """End the pending sequence. A long one becomes several of about the same length."""
        runs = [k for k in self.pending if isinstance(self.plan.instructions[k], Run)]
        pieces = -(-len(runs) // self.most)
        firsts = [runs[len(runs) * piece // pieces] for piece in range(pieces)]
        for first, end in pairwise([*firsts, len(self.plan.instructions)]):
            yield from self.piece([k for k in self.pending if first <= k < end])
        self.pending, self.later, self.regions = [], set(), set()
        self.frees_parameters = False

    def piece(self, positions: Sequence[int]) -> Iterator[Part]:
        code = self.plan.instructions
        runs = {k: one for k in positions if isinstance(one := code[k], Run)}
        if len(runs) == 1:
            yield from positions
        else:
            then = tuple(k for k in positions if k not in runs)
            waits = self.awaited(code[positions[0]].waits)
            yield self.joined(runs, then, waits)

    def joined(self, runs: dict[int, Run], then: tuple[int, ...], waits: Waits) -> KernelSequence:
        """Runs as one, with the results that something else reads."""
        made: dict[str, tuple[int, int]] = {
            name: (number, k)
            for number, run in enumerate(runs.values())
            for k, name in enumerate(run.writes)
        }
        reads = dict.fromkeys(n for run in runs.values() for n in run.reads if n not in made)
        writes = tuple(
            name for name in made if any(k not in runs for k in self.users.get(name, ()))
        )
        sources: dict[str, Source] = {name: k for k, name in enumerate(reads)}
        sources.update(made)
        wiring = Wiring(
            tuple(tuple(sources[name] for name in run.reads) for run in runs.values()),
            tuple(made[name] for name in writes),
        )
        return KernelSequence(
            tuple(runs), then, tuple(runs.values()), waits, tuple(reads), writes, wiring
        )
