"""Plans of divided regions that would hang or compute something else are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from divided import KINDS, divided_chain
from draws import drawn, draws, one_of
from plan.devices import positions
from plan.mutants import Plans, changed, other, rearranged, some, with_code

from piper.directives import Directive, Order, Place, Replicate, Shard, Split
from piper.errors import PlanError
from piper.ir.filters import where
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.check.check import check
from piper.plan.instructions import Instruction, Load, Redistribute, Slice, Total

EXAMPLES = draws(12, 100)
STEPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "shift", "shift-back")


@cache
def programs() -> tuple[Compiled, ...]:
    """One or two stages, one or two replicas of two devices each, any ZeRO level, some ordered."""
    made = []
    for number, kind in enumerate(KINDS):
        for copies in (1, 2):
            stages = 1 + (number + copies) % 2
            devices = [list(range(s * 2 * copies, (s + 1) * 2 * copies)) for s in range(stages)]
            program: list[Directive] = []
            for stage, mine in enumerate(devices):
                groups = [mine[k : k + 2] for k in range(0, len(mine), 2)]
                program += [
                    Place(where(PP=stage), mine),
                    Shard(where(PP=stage), groups, what="weights"),
                ]
                program += [Replicate(where(PP=stage), mine, zero=(number + copies) % 4)]
            program.append(Split("MB", 2))
            if stages == 1:
                slots = [where(MB=0, PASS="F"), [where(MB=1, PASS="F"), where(MB=0, PASS="B")],
                         where(MB=1, PASS="B")]  # fmt: skip
                program.append(Order(slots))
            model = divided_chain(stages, steps=KINDS[kind])
            made.append(compile_strategy(model, program, clip=bool(number % 2)))
        made.append(by_both(kind, zero=number % 4))
        made.append(unequal(kind, zero=(number + 1) % 4, overlapping=bool(number % 2)))
    return tuple(made)


def unequal(kind: str, zero: int, overlapping: bool) -> Compiled:
    """The first stage has one group, the second two, of which one may be that of the first."""
    others = [0, 1, 2, 3] if overlapping else [2, 3, 4, 5]
    program = [
        Place(where(PP=0), [0, 1]),
        Place(where(PP=1), others),
        Replicate(where(PP=0), [0, 1], zero=zero),
        Replicate(where(PP=1), others, zero=zero),
        Shard(where(PP=0), [0, 1], what="weights"),
        Shard(where(PP=1), [others[:2], others[2:]], what="weights"),
        Split("MB", 2),
    ]
    return compile_strategy(divided_chain(2, steps=KINDS[kind]), program, clip=True)


def by_both(kind: str, zero: int) -> Compiled:
    """By tokens and by weights, in two replicas."""
    devices = list(range(8))
    program = [
        Place(where(), devices),
        Replicate(where(), devices, zero=zero),
        Shard(where(), [[0, 1], [2, 3], [4, 5], [6, 7]], what="weights"),
        Shard(where(), [[0, 2], [1, 3], [4, 6], [5, 7]], what="tokens"),
        Split("MB", 2),
    ]
    return compile_strategy(divided_chain(steps=KINDS[kind], both=True), program, clip=True)


def dropped(plans: Plans, random: Random) -> Plans | None:
    """Its result is what was there before: as if the conversion did nothing."""
    plan, at = some(plans, random, Redistribute, Slice) or (None, 0)
    if plan is None:
        return None
    code = plan.instructions
    one = code[at]
    kept = rearranged(code, [k for k in range(len(code)) if k != at])
    return with_code(plans, plan.device, [renamed(each, one.into, one.value) for each in kept])


def dropped_everywhere(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Redistribute) or (None, 0)
    if plan is None:
        return None
    one = plan.instructions[at]
    for each in plans:
        code = each.instructions
        keep = [k for k in range(len(code)) if code[k].node != one.node]
        if len(keep) < len(code):
            left = [renamed(i, one.into, one.value) for i in rearranged(code, keep)]
            plans = with_code(plans, each.device, left)
    return plans


def renamed(one: Instruction, old: str, new: str) -> Instruction:
    """The instruction reads another buffer; it frees each once."""
    fields = {}
    for name in ("reads", "values"):
        if hasattr(one, name):
            swapped = (new if value == old else value for value in getattr(one, name))
            fields[name] = tuple(dict.fromkeys(swapped) if name == "values" else swapped)
    for name in ("value", "grad"):
        if getattr(one, name, None) == old:
            fields[name] = new
    return replace(one, **fields) if fields and not isinstance(one, Load) else one


def doubled(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Redistribute, Slice) or (None, 0)
    if plan is None:
        return None
    code = plan.instructions
    order = [*range(at + 1), at, *range(at + 1, len(code))]
    return with_code(plans, plan.device, rearranged(code, order))


def doubled_everywhere(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Redistribute) or (None, 0)
    if plan is None:
        return None
    node = plan.instructions[at].node
    for each in plans:
        code = each.instructions
        order = [k for k in range(len(code)) for _ in range(1 + (code[k].node == node))]
        plans = with_code(plans, each.device, rearranged(code, order))
    return plans


def swapped(plans: Plans, random: Random) -> Plans | None:
    """Two conversions of a device read each other's operands."""
    plan, at = some(plans, random, Redistribute, Slice) or (None, 0)
    if plan is None:
        return None
    code = plan.instructions
    same = [k for k in (*positions(plan, Redistribute), *positions(plan, Slice)) if k != at]
    others = [k for k in same if code[k].value != code[at].value]
    if not others:
        return None
    second = random.choice(others)
    wrong = changed(plans, plan, at, value=code[second].value)
    found = next(each for each in wrong if each.device == plan.device)
    return changed(wrong, found, second, value=code[at].value)


def field_changed(name: str) -> object:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, Redistribute) or (None, 0)
        if plan is None:
            return None
        one = plan.instructions[at]
        groups = [(0,), (0, 1), (1, 2), (2, 3), (0, 1, 2, 3), (4, 5)]
        options = {
            "group": groups,
            "step": STEPS,
            "stream": ["tp", "pp", "dp"],
            "shape": [((8, 4), "float32"), ((4, 4), "float32"), ((), "float32")],
            "value": [i.value for i in plan.instructions if isinstance(i, Redistribute)],
        }
        wrong = other(random, options[name], getattr(one, name))
        return None if wrong is None else changed(plans, plan, at, **{name: wrong})

    return slip


def wait_missing(plans: Plans, random: Random) -> Plans | None:
    """Whoever reads the result first does not wait for it."""
    plan, at = some(plans, random, Redistribute) or (None, 0)
    if plan is None:
        return None
    code = plan.instructions
    first = next((k for k in range(len(code)) if at in code[k].waits), None)
    if first is None:
        return None
    return changed(plans, plan, first, waits=tuple(w for w in code[first].waits if w != at))


def another_slice(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Slice) or (None, 0)
    if plan is None:
        return None
    return changed(plans, plan, at, part=1 - plan.instructions[at].part)


def another_rank(plans: Plans, random: Random) -> Plans | None:
    found = [
        (plan, k)
        for plan in plans
        for k in positions(plan, Load)
        if plan.instructions[k].role == "rank"
    ]
    plan, at = random.choice(found)
    return changed(plans, plan, at, index=1 - plan.instructions[at].index)


def loss_counted_by_all(plans: Plans, random: Random) -> Plans | None:
    """A second device of a group counts the loss, too."""
    totals = [(plan, k) for plan in plans for k in positions(plan, Total)]
    losses = [plan.instructions[k].losses for plan, k in totals if plan.instructions[k].losses]
    silent = [(plan, k) for plan, k in totals if not plan.instructions[k].losses]
    made = [(p, k) for p, k in silent if any("loss@0" in i.defines for i in p.instructions)]
    if not made:
        return None
    plan, at = random.choice(made)
    return changed(plans, plan, at, losses=losses[0][: random.randint(1, 2)])


SLIPS = {
    "dropped": dropped, "dropped everywhere": dropped_everywhere, "doubled": doubled,
    "doubled everywhere": doubled_everywhere, "swapped": swapped, "wait missing": wait_missing,
    "another slice": another_slice, "another rank": another_rank,
    "loss counted by all": loss_counted_by_all,
    **{f"another {name}": field_changed(name)
       for name in ("group", "step", "stream", "shape", "value")},
}  # fmt: skip


def mutants(
    name: str, examples: int = EXAMPLES, kind: str | None = None
) -> Iterator[tuple[Compiled, Plans]]:
    """Of all programs, or of those of one kind."""
    found, every = 0, programs()
    if kind:
        each, first = len(every) // len(KINDS), list(KINDS).index(kind)
        every = every[first * each : (first + 1) * each]
    for seed in range(20 * examples):
        compiled = every[seed % len(every)]
        plans = SLIPS[name](compiled.plans, Random(seed))
        if plans is not None and plans != compiled.plans:
            yield compiled, plans
            found += 1
        if found == examples:
            return


def test_the_plans_are_accepted_as_they_are() -> None:
    for compiled in programs():
        check(compiled.dag, compiled.plans)


@one_of(3)
@drawn
@pytest.mark.parametrize("name", SLIPS)
def test_plans_with_a_slip_are_refused(name: str) -> None:
    found = list(mutants(name))

    assert len(found) == EXAMPLES
    assert not any(is_accepted(*one) for one in found)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in SLIPS if name != "another slice"])
def test_plans_of_a_ring_with_a_slip_are_refused(name: str) -> None:
    found = list(mutants(name, 100, "ring"))

    assert len(found) == 100
    assert not any(is_accepted(*one) for one in found)


def is_accepted(compiled: Compiled, plans: Plans) -> bool:
    try:
        check(compiled.dag, plans)
    except PlanError:
        return False
    return True
