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
from typing import assert_never

from piper.plan.instructions import (
    Add,
    Exchange,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    Total,
    Update,
    Waits,
    is_dynamic,
    is_message,
)
from piper.plan.meeting import Buffers

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
            self.moving.update(moved_by(one, self.moving))
            self.loose.update(loosened_by(one, self.loose))

    def is_recorded(self, one: Instruction) -> bool:
        match one:
            case Run():
                moving = frozenset(self.moving.intersection(one.reads))
                return self.loose.isdisjoint(one.reads) and self.fits(one, moving)
            case Keep() | Add():
                return one.into not in self.moving and one.value not in self.moving
            case Free():
                return True
            case Load() | Send() | Recv() | Reduce() | Gather() | Exchange() | Total() | Update():
                return False
            case _:
                assert_never(one)

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


def moved_by(one: Instruction, moving: set[str]) -> Buffers:
    """What the host's own work leaves in memory of its own."""
    match one:
        case Run() | Exchange() | Reduce():
            return one.defines
        case Keep():
            return one.defines if one.value in moving else ()
        case Recv():
            return one.defines if any(map(is_dynamic, one.shapes)) else ()
        case Load() | Add() | Send() | Gather() | Total() | Update() | Free():
            return ()
        case _:
            assert_never(one)


def loosened_by(one: Instruction, loose: set[str]) -> Buffers:
    """What the host leaves with a number of rows that is not known beforehand."""
    match one:
        case Exchange():
            return one.defines if one.way != "back" else ()
        case Run() | Keep():
            return () if loose.isdisjoint(one.uses) else one.defines
        case Load() | Add() | Send() | Recv() | Reduce() | Gather() | Total() | Update() | Free():
            return ()
        case _:
            assert_never(one)
