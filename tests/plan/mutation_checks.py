"""Whether the check rejects a mutated plan, or the plan is still correct."""

from __future__ import annotations

from dataclasses import fields
from random import Random

from plan.devices import EARLY, LATE, executed, positions
from plan.integer_tensors import Wrong
from plan.mutants import Plans, changed, rearranged, some, with_code
from plan.mutations import ACTIONS
from plan.numbers import expected
from plan.programs import Program

from piper.errors import PlanError
from piper.job.compile.compiler import Compiled
from piper.plan.check.check import check
from piper.plan.instructions import Exchange, Free, Gather, Keep, Load, Reduce

BESIDE = (Reduce, Gather, Exchange)


def accepted(compiled: Compiled, plans: Plans) -> bool:
    try:
        check(compiled.dag, plans)
    except PlanError:
        return False
    return True


def is_right(program: Program, plans: Plans) -> bool:
    right = expected(program.model, program.parts, program.clip, 1, program.feeds)
    try:
        return all(
            executed(program.model, plans, when, 1, program.feed_of) == right
            for when in (EARLY, LATE)
        )
    except (Wrong, ValueError):
        return False


def must_be_refused(
    found: list[tuple[Program, Compiled, Plans]],
    unless_right: bool = False,
    at_least: int = 100,
    most: float = 0.25,
) -> None:
    """`unless_right`: a mutant may be correct, if another wait implies the one that is missing."""
    passed = [(program, plans) for program, dag, plans in found if accepted(dag, plans)]
    wrongly = [p for program, p in passed if not (unless_right and is_right(program, p))]

    assert len(found) >= at_least
    assert len(passed) <= len(found) * most
    assert not wrongly, f"{len(wrongly)} of {len(found)} are accepted"


def any_mutation(plans: Plans, random: Random) -> Plans | None:
    """Move an instruction, or copy any field from another one. The result is often wrong."""
    plan, at = some(plans, random, *ACTIONS, *BESIDE, Keep, Load, Free) or (None, 0)
    assert plan is not None
    code = plan.instructions
    if random.random() < 0.5:
        order = [k for k in range(len(code)) if k != at]
        order.insert(random.randint(0, len(order)), at)
        return with_code(plans, plan.device, rearranged(code, order))
    one = code[at]
    kin = [p.instructions[k] for p in plans for k in positions(p, type(one))]
    name = random.choice([field.name for field in fields(one) if field.name != "waits"])
    return changed(plans, plan, at, **{name: getattr(random.choice(kin), name)})
