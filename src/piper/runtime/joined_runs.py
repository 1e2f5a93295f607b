"""A program whose neighbouring runs are one call, where the plan allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from piper.plan.analyse.kernel_sequences import KernelSequence, sequences
from piper.plan.instructions import Free, Run, Waits
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Act, Kernel, Program


@dataclass(frozen=True, slots=True)
class Joins:
    """Which runs can be part of a sequence, and what computes one."""

    fits: Callable[[Run], bool]
    kernel: Callable[[KernelSequence], Kernel]


@dataclass(frozen=True, slots=True)
class JoinedRuns:
    """The functions of a step."""

    acts: Sequence[tuple[int, Act]]

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        return self.acts


def join_runs(program: Program, joins: Joins) -> JoinedRuns:
    """The whole plan. All its kernels are made now, before any message is in flight."""
    everything = range(len(program.plan.instructions))
    acts: list[tuple[int, Act]] = []
    for part in sequences(program.plan, everything, joins.fits):
        if isinstance(part, int):
            one = program.plan.instructions[part]
            if isinstance(one, Run):
                program.kernels(one.region, one.phase)
            acts.append((part, program.acts[part]))
        else:
            acts.append((part.at[0], joined(program, part, joins, part.waits)))
            acts += [(k, program.acts[k]) for k in part.then]
    return JoinedRuns(acts)


def plain_acts(program: Program, at: Iterable[int], joins: Joins | None) -> list[tuple[int, Act]]:
    """These instructions without their waits."""
    code = program.plan.instructions
    if joins is None:
        return [(k, program.plain(k, code[k])) for k in at]
    acts: list[tuple[int, Act]] = []
    for part in sequences(program.plan, at, joins.fits):
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
            if k in given:  # in a list, which the kernel empties
                operand = list(operand) if isinstance(operand, tuple | list) else [operand]
                slots[k] = None
            operands.append(operand)
        results = kernel(*operands)
        for k, result in zip(writes, results, strict=True):
            slots[k] = result

    return act


def given_up(program: Program, sequence: KernelSequence) -> set[str]:
    """What nothing reads after the sequence, and no message is still reading."""
    frees = [one for k in sequence.then if isinstance(one := program.plan.instructions[k], Free)]
    sent = {name for free in frees if free.waits for name in free.values}
    return set().union(*(program.ending[k] for k in sequence.at)) - sent
