"""Which parts of a plan can be recorded once and replayed, and which the host does every step.

A replay writes where the recording wrote. So a value is *fixed* if it is in the same memory every
step: parameters, what is loaded or received (into memory kept for it), what a recorded part made.
All else *moves*: it is copied to a fixed place before a recorded part reads it. Rows that an
exchange brings to experts are *loose*: there are more or fewer of them every time, and so there are
of what is made from them. What reads such rows is never recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from piper.plan.instructions import (
    Free,
    Instruction,
    Load,
    Plan,
    Run,
    Waits,
    is_message,
)

Fits = Callable[[Run, frozenset[str]], bool]  # whether a Run that reads these can be recorded


@dataclass(frozen=True, slots=True)
class Recorded:
    """Instructions that are replayed as one."""

    at: tuple[int, ...]
    waits: Waits
    copied: tuple[str, ...]  # what moves, and is read here
    shown: tuple[str, ...]  # what is written here, and read by the host
    ended: tuple[str, ...]  # what moves, and ends here


@dataclass(frozen=True, slots=True)
class Hosted:
    """An instruction that the host does."""

    at: int


Segment = Recorded | Hosted


def segments(plan: Plan, fits: Fits) -> tuple[Segment, ...]:
    """The plan, cut wherever the host has something to do or to wait for. Loads are left out:
    they are done when the step begins."""
    cutter = Cutter(plan, fits)
    for k, one in enumerate(plan.instructions):
        cutter.take(k, one)
    cutter.cut()
    outside = {name for k in cutter.hosted for name in plan.instructions[k].uses}
    return tuple(shown(plan, one, outside) for one in cutter.done)


@dataclass
class Cutter:
    """A plan, being cut."""

    plan: Plan
    fits: Fits
    moving: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)
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
            if one.loosens or (not is_message(one) and not self.loose.isdisjoint(one.uses)):
                self.loose.update(one.defines)

    def is_recorded(self, one: Instruction) -> bool:
        if isinstance(one, Run):
            moving = frozenset(self.moving.intersection(one.reads))
            return self.loose.isdisjoint(one.reads) and self.fits(one, moving)
        return one.recordable and self.moving.isdisjoint((*one.uses, *one.defines))

    def awaited(self, waits: Iterable[int]) -> Waits:
        """Of these, what the host must wait for: messages."""
        return tuple(k for k in waits if is_message(self.plan.instructions[k]))

    def cut(self) -> None:
        """What is pending is a segment of its own."""
        if not self.pending:
            return
        code = [self.plan.instructions[k] for k in self.pending]
        reads = dict.fromkeys(v for one in code if isinstance(one, Run) for v in one.reads)
        ended = [value for one in code if isinstance(one, Free) for value in one.ends]
        waits = self.awaited(k for one in code for k in one.waits)
        self.done.append(
            Recorded(
                tuple(self.pending),
                waits,
                tuple(value for value in reads if value in self.moving),
                (),
                tuple(value for value in ended if value in self.moving),
            )
        )
        self.pending = []


def shown(plan: Plan, segment: Segment, outside: set[str]) -> Segment:
    if isinstance(segment, Hosted):
        return segment
    names = (n for k in segment.at for n in plan.instructions[k].defines)
    wanted = tuple(dict.fromkeys(name for name in names if name in outside))
    return Recorded(segment.at, segment.waits, segment.copied, wanted, segment.ended)
