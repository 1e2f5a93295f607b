"""Mutations of plans of replicas: collectives, shards, buffers, and what each device counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from plan.devices import positions
from plan.mutants import (
    Mutation,
    Plans,
    at_random,
    buffers,
    changed,
    other,
    reads_of,
    rearranged,
    some,
    with_code,
)
from plan.mutations import (
    ACTIONS,
    MUTATIONS,
    counted_otherwise,
    doubled,
    dropped,
    moved_to_another_device,
    other_shapes,
    started_before_it_is_made,
    state_changed,
    swapped,
    wait_removed,
    wrong_buffer,
    wrong_field,
)  # fmt: skip
from plan.programs import STREAMS

from piper.plan.instructions import (
    Add,
    Free,
    Gather,
    Keep,
    Layout,
    Load,
    Plan,
    Reduce,
    Run,
    Send,
    Total,
    Update,
)  # fmt: skip

COLLECTIVES = (Reduce, Gather)
READERS = (Run, Add, Keep, Update, Total, Reduce, Send)


def same_communicator(plan: Plan, at: int) -> list[int]:
    """All instructions on the communicator of this one."""
    code = plan.instructions
    mine = code[at].stream, code[at].group
    found = [k for kind in COLLECTIVES for k in positions(plan, kind)]
    return sorted(k for k in found if (code[k].stream, code[k].group) == mine)


@at_random(*COLLECTIVES)
def two_of_a_communicator_swapped(
    plans: Plans, random: Random, plan: Plan, at: int
) -> Plans | None:
    b = other(random, same_communicator(plan, at), at)
    return None if b is None else swapped(plans, plan, at, b)


def a_gather_overtakes(plans: Plans, random: Random) -> Plans | None:
    """On one device only. Only the order on the other devices forbids it."""
    plan, at = some(plans, random, Gather) or (None, 0)
    earlier = [k for k in same_communicator(plan, at) if k < at] if plan else []
    if plan is None or not earlier:
        return None
    order = [k for k in range(len(plan.instructions)) if k != at]
    order.insert(earlier[-1], at)
    return with_code(plans, plan.device, rearranged(plan.instructions, order))


def misused(kind: type, name: str, wrong: Callable[..., Iterable[Any]]) -> Mutation:
    """A field has another one of the values that `wrong` returns."""

    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        options = wrong(plans, plan, plan.instructions[at])
        found = other(random, list(options), getattr(plan.instructions[at], name))
        return None if found is None else changed(plans, plan, at, **{name: found})

    return mutation


def other_groups(plans: Plans, plan: Plan, this: Reduce | Gather) -> Iterator[tuple[int, ...]]:
    group = this.group
    devices = [each.device for each in plans]
    yield from (group[1:], group[:-1], group[::-1], (*group, 99), tuple(devices), (plan.device,))
    yield from (tuple(sorted((*group, device))) for device in devices if device not in group)


def other_streams(plans: Plans, plan: Plan, this: Reduce | Gather) -> Sequence[str]:
    return STREAMS


def other_messages(plans: Plans, plan: Plan, this: Reduce | Gather) -> Iterator[tuple[Layout, ...]]:
    (dtype, tensors, padded), *rest = this.messages
    yield ((dtype, tensors, padded + len(this.group)), *rest)
    yield ((dtype, tensors, padded - len(this.group)), *rest)
    yield (("int8", tensors, padded), *rest)
    yield ((dtype, (*tensors, 9), padded), *rest)
    yield tuple(rest)
    yield this.messages[::-1]
    yield ((dtype, tensors[::-1], padded), *rest)


def flipped(plans: Plans, plan: Plan, this: Reduce) -> Sequence[bool]:
    return True, False


def buffers_in_use(plans: Plans, plan: Plan, this: Gather) -> Iterator[int]:
    """Those of gathers that came earlier, and whose result ends later."""
    at = plan.instructions.index(this)
    for k in positions(plan, Gather):
        before = plan.instructions[k]
        frees = [f for f in positions(plan, Free) if before.into in plan.instructions[f].values]
        if k < at < min(frees, default=0):
            yield before.buffer


def no_such_buffer(plans: Plans, plan: Plan, this: Gather) -> Sequence[int]:
    return len(plan.buffers), len(plan.buffers) + 3  # negative ones: see test_check


@at_random(Update)
def updated_before_the_last_gather(
    plans: Plans, random: Random, plan: Plan, at: int
) -> Plans | None:
    state = f"w:{plan.instructions[at].bucket}"
    gathers = [k for k in positions(plan, Gather) if plan.instructions[k].value == state]
    if not gathers:
        return None
    order = [k for k in range(len(plan.instructions)) if k != at]
    order.insert(gathers[-1] + random.randint(0, 1), at)
    return with_code(plans, plan.device, rearranged(plan.instructions, order))


def buffer_too_small(plans: Plans, random: Random) -> Plans | None:
    found = [(plan, k) for plan in plans for k, size in enumerate(plan.buffers) if size]
    if not found:
        return None
    plan, k = random.choice(found)
    sizes = list(plan.buffers)
    sizes[k] = random.choice([0, sizes[k] // 2, sizes[k] - 1])
    less = random.choice([tuple(sizes), plan.buffers[:k]])
    return tuple(replace(p, buffers=less) if p is plan else p for p in plans)


def counted_by_another_too(plans: Plans, random: Random) -> Plans | None:
    """A gradient that all of a group have is counted by one of them."""
    found = []
    for plan in plans:
        (at,) = positions(plan, Total)
        summed = [k for k in positions(plan, Reduce) if not plan.instructions[k].scatter]
        names = [plan.instructions[k].into for k in summed if k < at]
        found += [(plan, at, n) for n in names if n not in plan.instructions[at].grads]
    if not found:
        return None
    plan, at, name = random.choice(found)
    waits = [k for k in positions(plan, Reduce) if plan.instructions[k].into == name]
    total = plan.instructions[at]
    both = tuple(sorted({*total.waits, *waits}))
    return changed(plans, plan, at, grads=(*total.grads, name), waits=both)


def microbatches_of(plans: Plans) -> tuple[int, int]:
    """Of one replica, and of all that are fed together."""
    loads = [one for plan in plans for one in plan.instructions if isinstance(one, Load)]
    of_first = {one.part for one in loads if "#" not in one.value}
    return len(of_first), loads[0].parts


def loss_of_another_replica(plans: Plans, random: Random) -> Plans | None:
    mine, all_parts = microbatches_of(plans)
    plan, at = some(plans, random, Total) or (None, 0)
    if plan is None or mine == all_parts or not plan.instructions[at].losses:
        return None
    losses = list(plan.instructions[at].losses)
    k = random.randrange(len(losses))
    value, part = losses[k]
    losses[k] = value, (part + mine) % all_parts
    return changed(plans, plan, at, losses=tuple(losses))


def load_of_another_replica(plans: Plans, random: Random) -> Plans | None:
    mine, all_parts = microbatches_of(plans)
    plan, at = some(plans, random, Load) or (None, 0)
    if plan is None or mine == all_parts:
        return None
    part = (plan.instructions[at].part + mine) % all_parts
    return changed(plans, plan, at, part=part)


def input_of_another_replica(plans: Plans, random: Random) -> Plans | None:
    """A device that serves two replicas has the inputs of both."""
    found = [
        (plan, k, name)
        for plan in plans
        for k in positions(plan, Run)
        for name in plan.instructions[k].reads
        if name.endswith("#1") or f"{name}#1" in buffers(plan)
    ]
    if not found:
        return None
    plan, at, name = random.choice(found)
    wrong = name.removesuffix("#1") if name.endswith("#1") else f"{name}#1"
    reads = tuple(wrong if each == name else each for each in plan.instructions[at].reads)
    return changed(plans, plan, at, reads=reads)


@at_random(Run)
def another_gather_read(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    """A pass reads parameters that were gathered for another one."""
    gathered = [plan.instructions[k].into for k in positions(plan, Gather)]
    mine = [name for name in plan.instructions[at].reads if name in gathered]
    wrong = other(random, gathered, *mine)
    if not mine or wrong is None:
        return None
    reads = tuple(wrong if name == mine[0] else name for name in plan.instructions[at].reads)
    return changed(plans, plan, at, reads=reads)


@at_random(Gather)
def gathered_result_ends_early(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    """The buffer may be filled again before its last read."""
    code, name = list(plan.instructions), plan.instructions[at].into
    uses = [k for k in range(len(code)) if name in reads_of(code[k])]
    (end,) = [k for k in positions(plan, Free) if name in code[k].values]
    if len(uses) < 2:
        return None
    code[end] = replace(code[end], values=tuple(v for v in code[end].values if v != name))
    order = list(range(len(code)))
    order.insert(uses[0] + 1, len(code))
    return with_code(plans, plan.device, rearranged([*code, Free((name,))], order))


REPLICA_MUTATIONS: dict[str, Mutation] = {
    **{f"a {kind.__name__} is dropped": dropped(kind) for kind in COLLECTIVES},
    **{f"a {kind.__name__} is doubled": doubled(kind) for kind in COLLECTIVES},
    **{
        f"a {kind.__name__} is on another device": moved_to_another_device(kind)
        for kind in (*COLLECTIVES, *ACTIONS)
    },
    **{
        f"a {kind.__name__} is {what}": mutation
        for kind in COLLECTIVES
        for what, mutation in {
            "in another group": misused(kind, "group", other_groups),
            "on another stream": misused(kind, "stream", other_streams),
            "in other messages": misused(kind, "messages", other_messages),
            "another node": wrong_field(kind, "node"),
            "of another buffer": wrong_buffer(kind, "value"),
            "put into another buffer": wrong_buffer(kind, "into"),
            "read before it is there": wait_removed(kind, *READERS),
        }.items()
    },
    "two of a communicator are swapped on one device": two_of_a_communicator_swapped,
    "a Gather overtakes another collective on one device": a_gather_overtakes,
    "a Reduce scatters or not": misused(Reduce, "scatter", flipped),
    "a Reduce does not wait for its bundle": started_before_it_is_made(Reduce),
    "a Gather has other shapes": other_shapes(Gather),
    "a Gather fills a buffer that is in use": misused(Gather, "buffer", buffers_in_use),
    "a Gather fills a buffer that does not exist": misused(Gather, "buffer", no_such_buffer),
    "a buffer is too small": buffer_too_small,
    "a Run reads what was gathered for another": another_gather_read,
    "gathered parameters end before their last use": gathered_result_ends_early,
    "an Update comes before the last Gather": updated_before_the_last_gather,
    "a state is another shard": state_changed("shard"),
    "a state has other shards": state_changed("ways"),
    "a state is cut otherwise": state_changed("messages"),
    "a gradient is counted by two replicas": counted_by_another_too,
    "a gradient is missing in the Total": counted_otherwise("grads", "missing"),
    "a gradient is in the Total twice": counted_otherwise("grads", "twice"),
    "a loss is missing in the Total": counted_otherwise("losses", "missing"),
    "a loss is counted for another replica": loss_of_another_replica,
    "a Load is of another replica's part": load_of_another_replica,
    "a Run reads the input of another replica": input_of_another_replica,
    **{
        f"in replicas, {name}": MUTATIONS[name]
        for name in MUTATIONS
        if name.startswith(("a Run", "a Send", "a Recv", "a buffer", "a state"))
    },
}
