"""Mutations of any plan, each of which must be wrong."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from plan.devices import positions
from plan.mutants import (
    Mutation,
    Plans,
    at_random,
    buffers,
    changed,
    inserted,
    other,
    reads_of,
    rearranged,
    with_code,
    with_waits,
)

from piper.plan.instructions import (
    Add,
    Free,
    Keep,
    Load,
    Plan,
    Recv,
    Run,
    Send,
    Total,
    Update,
)  # fmt: skip

ACTIONS = (Run, Send, Recv, Add, Update, Total)


def dropped(kind: type) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        order = [k for k in range(len(plan.instructions)) if k != at]
        return with_code(plans, plan.device, rearranged(plan.instructions, order))

    return mutation


def doubled(kind: type) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        one = plan.instructions[at]
        return with_code(plans, plan.device, inserted(plan.instructions, at + 1, one))

    return mutation


def swapped(plans: Plans, plan: Plan, a: int, b: int) -> Plans:
    order = list(range(len(plan.instructions)))
    order[a], order[b] = order[b], order[a]
    return with_code(plans, plan.device, rearranged(plan.instructions, order))


def two_runs_swapped(plans: Plans, random: Random) -> Plans | None:
    plan = random.choice(plans)
    runs = positions(plan, Run)
    return swapped(plans, plan, *random.sample(runs, 2)) if len(runs) > 1 else None


def two_on_a_channel_swapped(kind: type) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, a: int) -> Plans | None:
        code = plan.instructions
        ends = code[a].peer, code[a].stream
        same = [k for k in positions(plan, kind) if (code[k].peer, code[k].stream) == ends]
        b = other(random, same, a)
        return None if b is None else swapped(plans, plan, a, b)

    return mutation


def waiting(plan: Plan, kinds: tuple[type, ...], on: type) -> list[tuple[int, int]]:
    """Instructions of some kinds, with what they wait for."""
    code = plan.instructions
    return [
        (k, w)
        for kind in kinds
        for k in positions(plan, kind)
        for w in code[k].waits
        if isinstance(code[w], on)
    ]


def a_run_swapped_with_its_receive(plans: Plans, random: Random) -> Plans | None:
    plan = random.choice(plans)
    pairs = waiting(plan, (Run,), Recv)
    return swapped(plans, plan, *random.choice(pairs)) if pairs else None


def peer_changed(kind: type) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        devices = [each.device for each in plans]
        peer = other(random, devices, plan.instructions[at].peer)
        return changed(plans, plan, at, peer=peer)

    return mutation


def moved_to_another_device(kind: type) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        one = with_waits(plan.instructions[at], ())
        target = other(random, plans, plan)
        position = random.randint(0, len(target.instructions))
        order = [k for k in range(len(plan.instructions)) if k != at]
        plans = with_code(plans, plan.device, rearranged(plan.instructions, order))
        return with_code(plans, target.device, inserted(target.instructions, position, one))

    return mutation


@at_random(Run)
def wrong_read(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    reads = list(plan.instructions[at].reads)
    k = random.randrange(len(reads))
    reads[k] = other(random, buffers(plan), reads[k])
    return changed(plans, plan, at, reads=tuple(reads))


@at_random(Run)
def reads_exchanged(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    reads = list(plan.instructions[at].reads)
    if len(reads) < 2:
        return None
    a, b = random.sample(range(len(reads)), 2)
    reads[a], reads[b] = reads[b], reads[a]
    return changed(plans, plan, at, reads=tuple(reads))


def wrong_field(kind: type, name: str) -> Mutation:
    """A field has the value of another instruction of the kind."""

    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        found = [getattr(p.instructions[k], name) for p in plans for k in positions(p, kind)]
        wrong = other(random, found, getattr(plan.instructions[at], name))
        return None if wrong is None else changed(plans, plan, at, **{name: wrong})

    return mutation


def wrong_buffer(kind: type, name: str) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        wrong = other(random, buffers(plan), getattr(plan.instructions[at], name))
        return changed(plans, plan, at, **{name: wrong})

    return mutation


@at_random(Free)
def free_before_the_last_use(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    free = plan.instructions[at]
    buffer = random.choice(free.values)
    uses = [k for k in range(at) if buffer in reads_of(plan.instructions[k])]
    if not uses:
        return None
    rest = replace(free, values=tuple(value for value in free.values if value != buffer))
    code = list(plan.instructions)
    code[at] = rest
    early = Free((buffer,), tuple(w for w in free.waits if w < uses[-1]))
    return with_code(plans, plan.device, inserted(code, uses[-1], early))


@at_random(Free)
def freed_twice(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    free = plan.instructions[at]
    return changed(plans, plan, at, values=(*free.values, random.choice(free.values)))


@at_random(Free)
def never_freed(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    values = list(plan.instructions[at].values)
    values.pop(random.randrange(len(values)))
    return changed(plans, plan, at, values=tuple(values))


def wait_removed(on: type, *kinds: type) -> Mutation:
    """Remove the only wait for a receive, for a total, or for a send whose buffer ends."""

    def mutation(plans: Plans, random: Random) -> Plans | None:
        plan = random.choice(plans)
        pairs = waiting(plan, kinds, on)
        if not pairs:
            return None
        at, gone = random.choice(pairs)
        waits = [w for w in plan.instructions[at].waits if w != gone]
        return changed(plans, plan, at, waits=tuple(waits))

    return mutation


def started_before_it_is_made(kind: type) -> Mutation:
    """Remove the only wait of any stream for the writer of the buffer that is sent or reduced."""

    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        code = plan.instructions
        made = [w for w in code[at].waits if isinstance(code[w], Run | Keep | Add | Update)]
        others = {w for k, one in enumerate(code) if k != at for w in one.waits}
        if not made or not others.isdisjoint(made):
            return None
        return changed(plans, plan, at, waits=tuple(w for w in code[at].waits if w not in made))

    return mutation


@at_random(Run, Update)
def wait_for_the_future(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    later = [k for k in positions(plan, Recv) + positions(plan, Send) if k > at]
    if not later:
        return None
    return changed(plans, plan, at, waits=(*plan.instructions[at].waits, random.choice(later)))


def loaded_otherwise(name: str) -> Mutation:
    """All microbatches must see their own part of the right input."""

    def mutation(plans: Plans, random: Random) -> Plans | None:
        found = [
            (plan, k)
            for plan in plans
            for k in positions(plan, Load)
            if name != "index" or plan.instructions[k].role == "batch"
        ]
        if not found:
            return None
        plan, at = random.choice(found)
        if name == "role":
            wrong = other(random, ["batch", "seed", "random"], plan.instructions[at].role)
        else:
            wrong = getattr(plan.instructions[at], name) + random.choice([-1, 1])
        return changed(plans, plan, at, **{name: wrong})

    return mutation


def other_shapes(kind: type) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        (sizes, dtype), *more = plan.instructions[at].shapes
        first = random.choice([((*sizes, 7), dtype), (sizes, "int8")])
        return changed(plans, plan, at, shapes=random.choice([(first, *more), tuple(more)]))

    return mutation


@at_random(Recv)
def other_bundle(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    return changed(plans, plan, at, bundle=not plan.instructions[at].bundle)


def counted_otherwise(name: str, change: str) -> Mutation:
    """A loss or a gradient is missing in the total, or in it twice."""

    @at_random(Total)
    def mutation(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
        parts = list(getattr(plan.instructions[at], name))
        if not parts:
            return None
        one = random.choice(parts)
        parts.remove(one) if change == "missing" else parts.append(one)
        return changed(plans, plan, at, **{name: tuple(parts)})

    return mutation


def losses_exchanged(plans: Plans, random: Random) -> Plans | None:
    """Microbatches weigh differently."""
    for plan in plans:
        (at,) = positions(plan, Total)
        losses = plan.instructions[at].losses
        if len(losses) > 1:
            (a, first), (b, second), *rest = losses
            return changed(plans, plan, at, losses=((a, second), (b, first), *rest))
    return None


@at_random(Total)
def other_group(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    group = plan.instructions[at].group
    return changed(plans, plan, at, group=random.choice([group[1:], (*group, 99), group[:-1]]))


@at_random(Update)
def clipped_otherwise(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    return changed(plans, plan, at, clip=not plan.instructions[at].clip)


@at_random(Run)
def other_writes(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    writes = plan.instructions[at].writes
    wrong = [(*writes, "more"), *([writes[:-1]] if writes else [])]
    return changed(plans, plan, at, writes=random.choice(wrong))


def state_changed(name: str) -> Mutation:
    def mutation(plans: Plans, random: Random) -> Plans | None:
        plan = random.choice(plans)
        if not plan.states:
            return None
        updated = {one.bucket for one in plan.instructions if isinstance(one, Update)}
        k = random.randrange(len(plan.states))
        state = plan.states[k]
        if name == "home" and state.bucket not in updated:
            return None
        found = [getattr(each, name) for p in plans for each in p.states]
        wrong = not state.home if name == "home" else other(random, found, getattr(state, name))
        if wrong is None:
            return None
        states = list(plan.states)
        states[k] = replace(state, **{name: wrong})
        return tuple(replace(p, states=tuple(states)) if p is plan else p for p in plans)

    return mutation


def state_missing(plans: Plans, random: Random) -> Plans | None:
    plan = random.choice(plans)
    if not plan.states:
        return None
    gone = random.choice(plan.states)
    states = tuple(state for state in plan.states if state is not gone)
    return tuple(replace(p, states=states) if p is plan else p for p in plans)


def a_plan_missing(plans: Plans, random: Random) -> Plans | None:
    gone = random.choice(plans)
    return tuple(plan for plan in plans if plan is not gone)


def received_into_parameters(plans: Plans, random: Random) -> Plans | None:
    """Receive a gradient into parameters after their last read and before their update."""
    for plan in random.sample(plans, len(plans)):
        code = plan.instructions
        for at in positions(plan, Recv):
            adds = [k for k in positions(plan, Add) if code[k].value == code[at].value]
            for k in [k for k in positions(plan, Update) if adds and k > adds[0]]:
                state = f"w:{code[k].bucket}"
                if not any(state in reads_of(one) for one in code[at:k]):
                    plans = changed(plans, plan, at, value=state)
                    plan = next(p for p in plans if p.device == plan.device)
                    return changed(plans, plan, adds[0], value=state)
    return None


MUTATIONS: dict[str, Mutation] = {
    **{f"a {kind.__name__} is dropped": dropped(kind) for kind in (*ACTIONS, Keep, Load)},
    **{f"a {kind.__name__} is doubled": doubled(kind) for kind in (*ACTIONS, Keep, Load, Free)},
    "two Runs are swapped": two_runs_swapped,
    "two Sends are swapped": two_on_a_channel_swapped(Send),
    "two Recvs are swapped": two_on_a_channel_swapped(Recv),
    "a Run comes before its Recv": a_run_swapped_with_its_receive,
    "a Send goes to another device": peer_changed(Send),
    "a Recv comes from another device": peer_changed(Recv),
    "a Send is on another stream": wrong_field(Send, "stream"),
    **{
        f"a {kind.__name__} is on another device": moved_to_another_device(kind)
        for kind in (*ACTIONS, Keep)
    },
    "a Run reads another buffer": wrong_read,
    "a Run reads in another order": reads_exchanged,
    "a Run writes something else": other_writes,
    "a Run is another node": wrong_field(Run, "node"),
    "a Run is of another region": wrong_field(Run, "region"),
    "a Run is of another phase": wrong_field(Run, "phase"),
    "a Send reads another buffer": wrong_buffer(Send, "value"),
    "a Send is another transfer": wrong_field(Send, "node"),
    "a Recv is another transfer": wrong_field(Recv, "node"),
    "an Add takes another buffer": wrong_buffer(Add, "value"),
    "an Add goes into another buffer": wrong_buffer(Add, "into"),
    "an Update reads another buffer": wrong_buffer(Update, "grad"),
    "an Update is of another bucket": wrong_field(Update, "bucket"),
    "an Update is clipped or not": clipped_otherwise,
    "a buffer ends before its last use": free_before_the_last_use,
    "a buffer ends twice": freed_twice,
    "a buffer never ends": never_freed,
    "nothing waits for a Recv": wait_removed(Recv, Run, Add, Keep, Update, Total),
    "a buffer ends while it is sent": wait_removed(Send, Free),
    "a clipped Update does not wait for the Total": wait_removed(Total, Update),
    "a Send does not wait for its buffer": started_before_it_is_made(Send),
    "something waits for what comes later": wait_for_the_future,
    **{f"a Load has another {name}": loaded_otherwise(name) for name in ("part", "parts", "index")},
    "a Load has another role": loaded_otherwise("role"),
    "a Send has other shapes": other_shapes(Send),
    "a Recv has other shapes": other_shapes(Recv),
    "a Recv makes a bundle or not": other_bundle,
    "a loss is missing in the Total": counted_otherwise("losses", "missing"),
    "a loss is in the Total twice": counted_otherwise("losses", "twice"),
    "losses in the Total are exchanged": losses_exchanged,
    "a gradient is missing in the Total": counted_otherwise("grads", "missing"),
    "a gradient is in the Total twice": counted_otherwise("grads", "twice"),
    "a Total is over other devices": other_group,
    "a state is of another bucket": state_changed("bucket"),
    "a state is at home or not": state_changed("home"),
    "a state is another one": state_changed("value"),
    "a state is missing": state_missing,
    "a plan is missing": a_plan_missing,
    "a Recv overwrites parameters": received_into_parameters,
}
