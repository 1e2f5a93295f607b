"""A program whose neighbouring runs are one call, where the plan allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from piper.plan.analyse.kernel_sequences import KernelSequence, Part, sequences
from piper.plan.instructions import Free, Plan, Run, Waits
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Act, Kernel, Program
from piper.runtime.joined_updates import with_joined_updates


@dataclass(frozen=True, slots=True)
class Joins:
    """Which runs can be part of a sequence, and what computes one."""

    fits: Callable[[Run], bool]
    kernel: Callable[[KernelSequence], Kernel]
    most: int  # runs in a sequence
    lists: bool  # whether a tensor that only the kernel needs comes in a list, which it empties
    reached: Callable[[], int]  # in which run of its sequence this thread's last kernel is


@dataclass(frozen=True, slots=True)
class JoinedRuns:
    """The functions of a step."""

    acts: Sequence[tuple[int, Act]]
    compiled: bool = False  # else the functions of single instructions have the same results

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        return self.acts


@dataclass(frozen=True, slots=True)
class Together:
    """A function that runs several instructions."""

    at: tuple[int, ...]
    do: Act

    def __call__(self) -> None:
        self.do()


def joined_parts(plan: Plan, at: Iterable[int], joins: Joins) -> Iterator[Part]:
    """These instructions of a plan, with runs joined."""
    return sequences(plan, at, joins.fits, joins.most)


def join_runs(program: Program, joins: Joins) -> JoinedRuns:
    """The whole plan. All its kernels are made now, before any message is in flight."""
    everything = range(len(program.plan.instructions))
    acts: list[tuple[int, Act]] = []
    for part in joined_parts(program.plan, everything, joins):
        if isinstance(part, int):
            one = program.plan.instructions[part]
            if isinstance(one, Run):
                program.kernels(one.region, one.phase)
            acts.append((part, program.acts[part]))
        else:
            acts.append((part.at[0], joined(program, part, joins, part.waits)))
            acts += [(k, program.acts[k]) for k in part.then]
    return JoinedRuns(with_joined_updates(program, acts), joins.lists)


def plain_acts(program: Program, at: Iterable[int], joins: Joins | None) -> list[tuple[int, Act]]:
    """These instructions without their waits."""
    code = program.plan.instructions
    if joins is None:
        return [(k, program.plain(k, code[k])) for k in at]
    acts: list[tuple[int, Act]] = []
    for part in joined_parts(program.plan, at, joins):
        if isinstance(part, int):
            acts.append((part, program.plain(part, code[part])))
        else:
            acts.append((part.at[0], joined(program, part, joins, ())))
            acts += [(k, program.plain(k, code[k])) for k in part.then]
    return acts


def joined(program: Program, sequence: KernelSequence, joins: Joins, waits: Waits) -> Act:
    """A sequence as a function without arguments."""
    kernel, slots = joins.kernel(sequence), program.slots
    reads, writes = (
        [program.slot(n) for n in names] for names in (sequence.reads, sequence.writes)
    )
    given = {program.slot(name) for name in given_up(program, sequence)}

    def act() -> None:
        for w in waits:
            program.wait_one(w)
        operands = []
        for k in reads:
            operand = slots[k]
            if k in given:
                slots[k] = None
                operand = given_operand(operand, joins.lists)
            operands.append(operand)
        try:
            results = kernel(*operands)
        except Exception:
            program.position = sequence.at[joins.reached()]
            raise
        for k, result in zip(writes, results, strict=True):
            slots[k] = result

    return Together(sequence.at, act)


def given_operand(operand: Any, in_list: bool) -> Any:
    """An operand that only the kernel needs."""
    if isinstance(operand, tuple | list):
        return list(operand)
    return [operand] if in_list else operand


def given_up(program: Program, sequence: KernelSequence) -> set[str]:
    """What nothing reads after the sequence, and no message is still reading."""
    frees = [one for k in sequence.then if isinstance(one := program.plan.instructions[k], Free)]
    sent = {name for free in frees if free.waits for name in free.values}
    return set().union(*(program.ending[k] for k in sequence.at)) - sent
