"""Mutations of token all-to-alls: what they read and write, their route, group and order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from plan.devices import positions
from plan.mutants import (
    Mutation,
    Plans,
    at_random,
    changed,
    inserted,
    other,
    reads_of,
    rearranged,
    some,
    with_code,
)
from plan.mutations import swapped
from plan.replica_mutations import other_groups, other_streams

from piper.plan.instructions import (
    Exchange,
    Free,
    Gather,
    Instruction,
    Plan,
    Reduce,
    Run,
    Shape,
)  # fmt: skip

Change = Callable[[Instruction], Instruction]


def of_way(plans: Plans, random: Random, *ways: str) -> tuple[Plan, int] | None:
    found = [
        (plan, k)
        for plan in plans
        for k in positions(plan, Exchange)
        if plan.instructions[k].way in ways
    ]
    return random.choice(found) if found else None


def microbatch(name: str) -> str:
    """The microbatch in the name of a value or node: x@1~PP0.EP0 is of @1."""
    return name.partition("@")[2].partition("~")[0].partition("#")[0]


def of_another_microbatch(plan: Plan, name: str) -> list[str]:
    """Buffers that have the same name, but for the microbatch."""
    mine = microbatch(name)
    made = [w for one in plan.instructions if isinstance(one, Run | Exchange) for w in one.writes]
    return [
        w
        for w in dict.fromkeys(made)
        if w != name and w.replace(f"@{microbatch(w)}", f"@{mine}") == name
    ]


def read_of_another_microbatch(position: int, *ways: str) -> Mutation:
    """Of what an exchange reads: 0 are rows, -1 the counts or the route."""

    def mutation(plans: Plans, random: Random) -> Plans | None:
        plan, at = of_way(plans, random, *ways) or (None, 0)
        if plan is None:
            return None
        reads = list(plan.instructions[at].reads)
        wrong = other(random, of_another_microbatch(plan, reads[position]))
        if wrong is None:
            return None
        reads[position] = wrong
        return changed(plans, plan, at, reads=tuple(reads))

    return mutation


def everywhere(plans: Plans, node: str, change: Change) -> Plans:
    """Change all devices of a node in the same way, so that they still match each other."""
    return tuple(
        replace(
            plan,
            instructions=tuple(
                change(one) if getattr(one, "node", None) == node else one
                for one in plan.instructions
            ),
        )
        for plan in plans
    )


def read_of_another_microbatch_everywhere(position: int, *ways: str) -> Mutation:
    def mutation(plans: Plans, random: Random) -> Plans | None:
        plan, at = of_way(plans, random, *ways) or (None, 0)
        if plan is None:
            return None
        right = plan.instructions[at].reads[position]
        wrong = other(random, of_another_microbatch(plan, right))

        def change(one: Instruction) -> Instruction:
            assert isinstance(one, Exchange)
            return replace(one, reads=tuple(wrong if r == right else r for r in one.reads))

        return everywhere(plans, plan.instructions[at].node, change) if wrong else None

    return mutation


def changed_everywhere(name: str, wrong: Callable[..., Sequence | Iterator]) -> Mutation:
    """A field of an exchange has another value on all devices."""

    @at_random(Exchange)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        one = plan.instructions[at]
        found = other(random, list(wrong(plans, plan, one)), getattr(one, name))
        if found is None:
            return None
        return everywhere(plans, one.node, lambda each: replace(each, **{name: found}))

    return mutation


@at_random(Exchange)
def left_out_everywhere(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    node = plan.instructions[at].node
    for each in plans:
        code = each.instructions
        kept = [k for k, one in enumerate(code) if getattr(one, "node", None) != node]
        plans = with_code(plans, each.device, rearranged(code, kept))
    return plans


def other_ways(plans: Plans, plan: Plan, one: Exchange) -> Sequence[str]:
    return "counted", "out", "back"


def ep_streams(plans: Plans, plan: Plan, one: Exchange) -> Sequence[str]:
    return (*other_streams(plans, plan, one), "ep", "compute", "else")  # type: ignore[arg-type]


def all_groups(plans: Plans, plan: Plan, one: Exchange) -> Iterator[tuple[int, ...]]:
    yield from other_groups(plans, plan, one)  # type: ignore[arg-type]
    yield from {each.group for p in plans for each in p.instructions if isinstance(each, Exchange)}


def groups_of_others(plans: Plans, plan: Plan, one: Reduce | Gather) -> Iterator[tuple[int, ...]]:
    """Groups of experts, of dense parameters, and of devices that hold other experts."""
    yield from other_groups(plans, plan, one)
    kinds = Exchange | Reduce | Gather
    yield from {each.group for p in plans for each in p.instructions if isinstance(each, kinds)}


def other_rows(plans: Plans, plan: Plan, one: Exchange) -> Iterator[tuple[Shape, ...]]:
    ((length, *sizes), dtype), *more = one.shapes
    yield (((length, *sizes, 2), dtype), *more)
    yield (((length, *sizes), "int8"), *more)
    yield ((((length or 0) + 1, *sizes), dtype), *more)
    yield tuple(more)
    yield (*one.shapes, one.shapes[0])


def permuted(name: str) -> Mutation:
    """What an exchange reads or writes, in another order."""

    def mutation(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, Exchange) or (None, 0)
        values = list(getattr(plan.instructions[at], name)) if plan else []
        if plan is None or len(values) < 2:
            return None
        a, b = random.sample(range(len(values)), 2)
        values[a], values[b] = values[b], values[a]
        return changed(plans, plan, at, **{name: tuple(values)})

    return mutation


def more_or_less(name: str) -> Mutation:
    @at_random(Exchange)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        values = getattr(plan.instructions[at], name)
        wrong = [values[1:], values[:-1], (*values, values[0]), (values[0], *values)]
        return changed(plans, plan, at, **{name: random.choice(wrong)})

    return mutation


def same_communicator(plan: Plan, at: int) -> list[int]:
    code, kinds = plan.instructions, (Exchange, Reduce, Gather)
    mine = code[at].stream, code[at].group
    found = [k for kind in kinds for k in positions(plan, kind)]
    return sorted(k for k in found if (code[k].stream, code[k].group) == mine)


def two_swapped(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Exchange) or (None, 0)
    b = other(random, same_communicator(plan, at), at) if plan else None
    return None if plan is None or b is None else swapped(plans, plan, at, b)


def one_overtakes(plans: Plans, random: Random) -> Plans | None:
    """On one device only: as early as its operands allow."""
    plan, at = some(plans, random, Exchange) or (None, 0)
    earlier = [k for k in same_communicator(plan, at) if k < at] if plan else []
    if plan is None or not earlier:
        return None
    order = [k for k in range(len(plan.instructions)) if k != at]
    order.insert(random.choice(earlier), at)
    return with_code(plans, plan.device, rearranged(plan.instructions, order))


@at_random(Exchange)
def two_exchanged(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    """Two exchanges of a device change places, and with them what each waits for."""
    code = list(plan.instructions)
    b = other(random, [k for k in same_communicator(plan, at) if isinstance(code[k], Exchange)], at)
    if b is None:
        return None
    one, two = code[at], code[b]
    code[at], code[b] = replace(two, waits=one.waits), replace(one, waits=two.waits)
    return with_code(plans, plan.device, code)


@at_random(Exchange)
def ends_while_it_travels(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    """Rows, counts or a route end right after the all-to-all that reads them has started."""
    code = list(plan.instructions)
    buffer = random.choice(code[at].reads)
    ends = [k for k in positions(plan, Free) if buffer in code[k].values]
    if not ends:
        return None
    code[ends[0]] = replace(
        code[ends[0]], values=tuple(v for v in code[ends[0]].values if v != buffer)
    )
    return with_code(plans, plan.device, inserted(code, at + 1, Free((buffer,))))


@at_random(Exchange)
def ends_before_it_is_read(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    """A result of an all-to-all that has completed ends before its last use."""
    code = list(plan.instructions)
    buffer = random.choice(code[at].writes)
    ends = [k for k in positions(plan, Free) if buffer in code[k].values]
    uses = [k for k in range(len(code)) if buffer in reads_of(code[k])]
    if not ends or not uses:
        return None
    code[ends[0]] = replace(
        code[ends[0]], values=tuple(v for v in code[ends[0]].values if v != buffer)
    )
    return with_code(plans, plan.device, inserted(code, uses[-1], Free((buffer,), (at,))))
