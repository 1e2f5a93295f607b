"""Plans to mutate, and functions that change plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from random import Random
from typing import Any

from plan.devices import positions
from plan.expert_programs import random_experts
from plan.programs import Program, random_program

from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.instructions import (
    Add,
    Exchange,
    Gather,
    Instruction,
    Keep,
    Load,
    Plan,
    Reduce,
    Run,
    Send,
    Total,
    Update,
)  # fmt: skip

Plans = tuple[Plan, ...]
Programs = tuple[tuple[Program, Compiled], ...]
Mutation = Callable[[Plans, Random], Plans | None]  # None: it does not apply to these plans


@cache
def alone() -> Programs:
    """Compiled programs on two to five devices, with total orders; most clip gradients."""
    made = []
    for seed in range(40):
        random = Random(seed)
        devices = random.randint(2, 4)
        made.append(compiled(seed, random, random.randint(devices, 5), devices, copies=1))
    return tuple(made)


@cache
def replicated() -> Programs:
    """The same, smaller, with two to four replicas of everything."""
    made = []
    for seed in range(45):
        random = Random(seed)
        copies, devices = random.choice([2, 2, 3, 4]), random.randint(1, 2)
        made.append(compiled(seed, random, random.randint(2, 4), devices, copies))
    return tuple(made)


@cache
def with_experts() -> Programs:
    """Small programs whose experts are divided, a third of them in pairs of four replicas."""
    made = []
    for seed in range(75):
        random = Random(seed)
        copies = 2 if seed % 4 else 4
        program = random_experts(
            random, random.choice([1, 1, 1, 2]), 2, copies, all_ordered=True, overlapping=False,
            layers=1,
        )  # fmt: skip
        if all(1 < shard.sharding.ways <= 2 for _, shard in program.shards):
            found = compile_strategy(program.model, program.directives, clip=program.clip)
            made.append((program, found))
    return tuple(made)


def compiled(
    seed: int, random: Random, stages: int, devices: int, copies: int
) -> tuple[Program, Compiled]:
    program = random_program(
        random, stages, random.randint(1, 4), min_devices=devices, all_ordered=True,
        overlapping=False, clip=seed % 3 > 0, copies=copies,
    )  # fmt: skip
    return program, compile_strategy(program.model, program.directives, clip=program.clip)


def mutants(
    mutation: Mutation, programs: Programs, count: int
) -> Iterator[tuple[Program, Compiled, Plans]]:
    """Plans with one mutation each, from all programs in turn."""

    def endless() -> Iterator[tuple[Program, Compiled, Plans]]:
        for seed in range(20 * count):
            program, compiled = programs[seed % len(programs)]
            plans = mutation(compiled.plans, Random(seed))
            if plans is not None and plans != compiled.plans:
                yield program, compiled, plans

    return islice(endless(), count)


# Functions that change plans. Waits follow the instructions that they refer to.


def with_code(plans: Plans, device: int, code: Sequence[Instruction]) -> Plans:
    return tuple(replace(p, instructions=tuple(code)) if p.device == device else p for p in plans)


def rearranged(code: Sequence[Instruction], order: Sequence[int]) -> list[Instruction]:
    """The instructions in another order. Waits for those that are left out are removed."""
    now = {old: new for new, old in reversed(list(enumerate(order)))}
    return [with_waits(code[k], (now[w] for w in code[k].waits if w in now)) for k in order]


def with_waits(one: Instruction, waits: Iterator[int] | Sequence[int]) -> Instruction:
    return one if isinstance(one, Load) else replace(one, waits=tuple(waits))


def inserted(code: Sequence[Instruction], at: int, one: Instruction) -> list[Instruction]:
    moved = [with_waits(each, [w + (w >= at) for w in each.waits]) for each in code]
    return [*moved[:at], one, *moved[at:]]


def changed(plans: Plans, plan: Plan, at: int, **fields: Any) -> Plans:
    code = list(plan.instructions)
    code[at] = replace(code[at], **fields)
    return with_code(plans, plan.device, code)


def some(plans: Plans, random: Random, *kinds: type) -> tuple[Plan, int] | None:
    """A random instruction of these kinds."""
    found = [(plan, k) for plan in plans for kind in kinds for k in positions(plan, kind)]
    return random.choice(found) if found else None


def at_random(*kinds: type) -> Callable[[Callable[..., Plans | None]], Mutation]:
    """A mutation of a random instruction of these kinds. It does not apply if there is none."""

    def mutates(change: Callable[[Plans, Random, Plan, int], Plans | None]) -> Mutation:
        def mutation(plans: Plans, random: Random) -> Plans | None:
            found = some(plans, random, *kinds)
            return None if found is None else change(plans, random, *found)

        return mutation

    return mutates


def other(random: Random, options: Sequence[Any], *than: Any) -> Any:
    found = [option for option in dict.fromkeys(options) if option not in than]
    return random.choice(found) if found else None


def reads_of(one: Instruction) -> tuple[str, ...]:
    match one:
        case Run() | Exchange():
            return one.reads
        case Send() | Keep() | Reduce() | Gather():
            return (one.value,)
        case Add():
            return one.into, one.value
        case Update():
            return (one.grad,)
        case Total():
            return *(value for value, _ in one.losses), *one.grads
    return ()


def buffers(plan: Plan) -> list[str]:
    states = [state.value for state in plan.states]
    return [*states, *(buffer for one in plan.instructions for buffer in reads_of(one))]
