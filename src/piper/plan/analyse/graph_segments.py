"""Which parts of a plan can be recorded as CUDA graphs, and which the host runs every step.

A replay writes to the addresses of the recording. A value is *fixed* if it has the same address in
every step: parameters, values that are loaded or received, and results of recorded segments. All
other values *move*: they are copied to a fixed address before a recorded segment reads them. Tokens
that a token all-to-all brings to experts are *dynamic*: their number changes from step to step, and
so does the size of everything computed from them. Instructions that read dynamic values are never
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from piper.plan.instructions import Free, Instruction, Load, Plan, Run, Waits, is_message

Fits = Callable[[Run, frozenset[str]], bool]  # can a Run with these moving reads be recorded?


@dataclass(frozen=True, slots=True)
class Recorded:
    """Instructions that are recorded and replayed as one graph."""

    at: tuple[int, ...]
    waits: Waits
    copied: tuple[str, ...]  # moving values that are read here
    exported: tuple[str, ...]  # values that are written here and read by the host
    freed: tuple[str, ...]  # moving values that are freed here


@dataclass(frozen=True, slots=True)
class Hosted:
    """An instruction that the host runs."""

    at: int


Segment = Recorded | Hosted


def segments(plan: Plan, fits: Fits) -> tuple[Segment, ...]:
    """The plan, cut wherever the host has to run an instruction or wait for a message.

    Loads are left out: they are done when the step begins.
    """
    segmenter = Segmenter(plan, fits)
    for k, one in enumerate(plan.instructions):
        segmenter.take(k, one)
    segmenter.cut()
    outside = {name for k in segmenter.hosted for name in plan.instructions[k].uses}
    return tuple(exported(plan, one, outside) for one in segmenter.done)


@dataclass
class Segmenter:
    """Cuts a plan into segments, instruction by instruction."""

    plan: Plan
    fits: Fits
    moving: set[str] = field(default_factory=set)
    dynamic: set[str] = field(default_factory=set)
    pending: list[int] = field(default_factory=list)
    hosted: list[int] = field(default_factory=list)
    done: list[Segment] = field(default_factory=list)

    def take(self, k: int, one: Instruction) -> None:
        if isinstance(one, Load):
            return
        if self.is_recorded(one):
            if one.waits and self.awaited(one.waits):
                self.cut()
            self.pending.append(k)
        else:
            self.cut()
            self.hosted.append(k)
            self.done.append(Hosted(k))
            if not one.fixed:
                self.moving.update(one.defines)
            if one.has_dynamic_results or (
                not is_message(one) and not self.dynamic.isdisjoint(one.uses)
            ):
                self.dynamic.update(one.defines)

    def is_recorded(self, one: Instruction) -> bool:
        if isinstance(one, Run):
            moving = frozenset(self.moving.intersection(one.reads))
            return self.dynamic.isdisjoint(one.reads) and self.fits(one, moving)
        return one.recordable and self.moving.isdisjoint((*one.uses, *one.defines))

    def awaited(self, waits: Iterable[int]) -> Waits:
        """Those that the host must wait for: messages."""
        return tuple(k for k in waits if is_message(self.plan.instructions[k]))

    def cut(self) -> None:
        """Close the pending segment."""
        if not self.pending:
            return
        code = [self.plan.instructions[k] for k in self.pending]
        reads = dict.fromkeys(v for one in code if isinstance(one, Run) for v in one.reads)
        freed = [value for one in code if isinstance(one, Free) for value in one.ends]
        waits = self.awaited(k for one in code for k in one.waits)
        self.done.append(
            Recorded(
                tuple(self.pending),
                waits,
                tuple(value for value in reads if value in self.moving),
                (),
                tuple(value for value in freed if value in self.moving),
            )
        )
        self.pending = []


def exported(plan: Plan, segment: Segment, outside: set[str]) -> Segment:
    if isinstance(segment, Hosted):
        return segment
    names = (n for k in segment.at for n in plan.instructions[k].defines)
    wanted = tuple(dict.fromkeys(name for name in names if name in outside))
    return Recorded(segment.at, segment.waits, segment.copied, wanted, segment.freed)
