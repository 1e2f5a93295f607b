"""Plans that would hang or compute something else are refused: every kind of slip, many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import islice
from random import Random
from typing import Any

import pytest
from plan.numbers import EARLY, LATE, Wrong, executed, expected, positions
from plan.programs import Program, random_program
from synthetic import chain, frozen

from piper.compiler import Compiled, compile_strategy
from piper.directives import Place, Split
from piper.errors import PlanError
from piper.ir.filters import where
from piper.ir.spec import BUG
from piper.plan.check import check
from piper.plan.instructions import (
    Add,
    Free,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Run,
    Send,
    Total,
    Update,
)  # fmt: skip

Plans = tuple[Plan, ...]
Slip = Callable[[Plans, Random], Plans | None]  # None: these plans have no place for it
EXAMPLES = 105
ACTIONS = (Run, Send, Recv, Add, Update, Total)


@cache
def pool() -> tuple[tuple[Program, Compiled], ...]:
    """Compiled programs on two to five devices; all orders are total, most have clipping."""
    made = []
    for seed in range(40):
        random = Random(seed)
        devices = random.randint(2, 4)
        program = random_program(
            random, random.randint(devices, 5), random.randint(1, 4), min_devices=devices,
            all_ordered=True, overlapping=False, clip=seed % 3 > 0,
        )  # fmt: skip
        compiled = compile_strategy(program.model, program.directives, clip=program.clip)
        made.append((program, compiled))
    return tuple(made)


def mutants(slip: Slip, count: int) -> Iterator[tuple[Program, Compiled, Plans]]:
    """Plans with one slip each, from all programs in turn."""

    def endless() -> Iterator[tuple[Program, Compiled, Plans]]:
        for seed in range(10 * count):
            program, compiled = pool()[seed % len(pool())]
            plans = slip(compiled.plans, Random(seed))
            if plans is not None and plans != compiled.plans:
                yield program, compiled, plans

    return islice(endless(), count)


def accepted(compiled: Compiled, plans: Plans) -> bool:
    try:
        check(compiled.dag, plans)
    except PlanError:
        return False
    return True


# How to change plans: waits follow the instructions they mean.


def with_code(plans: Plans, device: int, code: Sequence[Instruction]) -> Plans:
    return tuple(replace(p, instructions=tuple(code)) if p.device == device else p for p in plans)


def rearranged(code: Sequence[Instruction], order: Sequence[int]) -> list[Instruction]:
    """The instructions in another order; what is left out is waited for no more."""
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


def other(random: Random, options: Sequence[Any], *than: Any) -> Any:
    found = [option for option in dict.fromkeys(options) if option not in than]
    return random.choice(found) if found else None


def reads_of(one: Instruction) -> tuple[str, ...]:
    match one:
        case Run():
            return one.reads
        case Send() | Keep():
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


# Slips, each built so that it must be wrong.


def dropped(kind: type) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        order = [k for k in range(len(plan.instructions)) if k != at]
        return with_code(plans, plan.device, rearranged(plan.instructions, order))

    return slip


def doubled(kind: type) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        one = plan.instructions[at]
        return with_code(plans, plan.device, inserted(plan.instructions, at + 1, one))

    return slip


def swapped(plans: Plans, plan: Plan, a: int, b: int) -> Plans:
    order = list(range(len(plan.instructions)))
    order[a], order[b] = order[b], order[a]
    return with_code(plans, plan.device, rearranged(plan.instructions, order))


def two_runs_swapped(plans: Plans, random: Random) -> Plans | None:
    plan = random.choice(plans)
    runs = positions(plan, Run)
    return swapped(plans, plan, *random.sample(runs, 2)) if len(runs) > 1 else None


def two_on_a_channel_swapped(kind: type) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, a = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        code = plan.instructions
        ends = code[a].peer, code[a].stream
        same = [k for k in positions(plan, kind) if (code[k].peer, code[k].stream) == ends]
        b = other(random, same, a)
        return None if b is None else swapped(plans, plan, a, b)

    return slip


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


def peer_changed(kind: type) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        devices = [each.device for each in plans]
        peer = other(random, devices, plan.instructions[at].peer)
        return changed(plans, plan, at, peer=peer)

    return slip


def moved_to_another_device(kind: type) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        one = with_waits(plan.instructions[at], ())
        target = other(random, plans, plan)
        position = random.randint(0, len(target.instructions))
        order = [k for k in range(len(plan.instructions)) if k != at]
        plans = with_code(plans, plan.device, rearranged(plan.instructions, order))
        return with_code(plans, target.device, inserted(target.instructions, position, one))

    return slip


def wrong_read(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Run) or (None, 0)
    assert plan is not None
    reads = list(plan.instructions[at].reads)
    k = random.randrange(len(reads))
    reads[k] = other(random, buffers(plan), reads[k])
    return changed(plans, plan, at, reads=tuple(reads))


def reads_exchanged(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Run) or (None, 0)
    assert plan is not None
    reads = list(plan.instructions[at].reads)
    if len(reads) < 2:
        return None
    a, b = random.sample(range(len(reads)), 2)
    reads[a], reads[b] = reads[b], reads[a]
    return changed(plans, plan, at, reads=tuple(reads))


def wrong_field(kind: type, name: str) -> Slip:
    """A field that other instructions of the kind have otherwise."""

    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        found = [getattr(p.instructions[k], name) for p in plans for k in positions(p, kind)]
        wrong = other(random, found, getattr(plan.instructions[at], name))
        return None if wrong is None else changed(plans, plan, at, **{name: wrong})

    return slip


def wrong_buffer(kind: type, name: str) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        wrong = other(random, buffers(plan), getattr(plan.instructions[at], name))
        return changed(plans, plan, at, **{name: wrong})

    return slip


def free_before_the_last_use(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Free) or (None, 0)
    assert plan is not None
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


def freed_twice(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Free) or (None, 0)
    assert plan is not None
    free = plan.instructions[at]
    return changed(plans, plan, at, values=(*free.values, random.choice(free.values)))


def never_freed(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Free) or (None, 0)
    assert plan is not None
    values = list(plan.instructions[at].values)
    values.pop(random.randrange(len(values)))
    return changed(plans, plan, at, values=tuple(values))


def wait_removed(on: type, *kinds: type) -> Slip:
    """The only wait for a receive, for a total or for a send whose buffer ends."""

    def slip(plans: Plans, random: Random) -> Plans | None:
        plan = random.choice(plans)
        pairs = waiting(plan, kinds, on)
        if not pairs:
            return None
        at, gone = random.choice(pairs)
        waits = [w for w in plan.instructions[at].waits if w != gone]
        return changed(plans, plan, at, waits=tuple(waits))

    return slip


def sent_before_it_is_made(plans: Plans, random: Random) -> Plans | None:
    """The only wait of a send for what makes its buffer."""
    plan, at = some(plans, random, Send) or (None, 0)
    if plan is None:
        return None
    send = plan.instructions[at]
    makers = [waits for k in positions(plan, Send) if (waits := plan.instructions[k].waits)]
    alone = sum(send.waits == waits for waits in makers) == 1
    return changed(plans, plan, at, waits=()) if alone else None


def wait_for_the_future(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Run, Update) or (None, 0)
    assert plan is not None
    later = [k for k in positions(plan, Recv) + positions(plan, Send) if k > at]
    if not later:
        return None
    return changed(plans, plan, at, waits=(*plan.instructions[at].waits, random.choice(later)))


def loaded_otherwise(name: str) -> Slip:
    """All microbatches must see their own part of the right input."""

    def slip(plans: Plans, random: Random) -> Plans | None:
        found = [
            (plan, k)
            for plan in plans
            for k in positions(plan, Load)
            if name != "index" or plan.instructions[k].origin == "batch"
        ]
        plan, at = random.choice(found)
        if name == "origin":
            wrong = other(random, ["batch", "seed", "random"], plan.instructions[at].origin)
        else:
            wrong = getattr(plan.instructions[at], name) + random.choice([-1, 1])
        return changed(plans, plan, at, **{name: wrong})

    return slip


def other_shapes(kind: type) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, kind) or (None, 0)
        if plan is None:
            return None
        (sizes, dtype), *more = plan.instructions[at].shapes
        first = random.choice([((*sizes, 7), dtype), (sizes, "int8")])
        return changed(plans, plan, at, shapes=random.choice([(first, *more), tuple(more)]))

    return slip


def other_bundle(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Recv) or (None, 0)
    return plan and changed(plans, plan, at, bundle=not plan.instructions[at].bundle)


def counted_otherwise(name: str, change: str) -> Slip:
    """A loss or a gradient is missing in the total, or in it twice."""

    def slip(plans: Plans, random: Random) -> Plans | None:
        plan, at = some(plans, random, Total) or (None, 0)
        assert plan is not None
        parts = list(getattr(plan.instructions[at], name))
        if not parts:
            return None
        one = random.choice(parts)
        parts.remove(one) if change == "missing" else parts.append(one)
        return changed(plans, plan, at, **{name: tuple(parts)})

    return slip


def losses_exchanged(plans: Plans, random: Random) -> Plans | None:
    """Microbatches weigh differently."""
    for plan in plans:
        (at,) = positions(plan, Total)
        losses = plan.instructions[at].losses
        if len(losses) > 1:
            (a, first), (b, second), *rest = losses
            return changed(plans, plan, at, losses=((a, second), (b, first), *rest))
    return None


def other_group(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Total) or (None, 0)
    assert plan is not None
    group = plan.instructions[at].group
    return changed(plans, plan, at, group=random.choice([group[1:], (*group, 99), group[:-1]]))


def clipped_otherwise(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Update) or (None, 0)
    return plan and changed(plans, plan, at, clip=not plan.instructions[at].clip)


def other_writes(plans: Plans, random: Random) -> Plans | None:
    plan, at = some(plans, random, Run) or (None, 0)
    assert plan is not None
    writes = plan.instructions[at].writes
    wrong = [(*writes, "more"), *([writes[:-1]] if writes else [])]
    return changed(plans, plan, at, writes=random.choice(wrong))


def state_changed(name: str) -> Slip:
    def slip(plans: Plans, random: Random) -> Plans | None:
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

    return slip


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
    """A gradient takes the place of parameters that are read no more but not updated yet."""
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


SLIPS: dict[str, Slip] = {
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
    "a Send does not wait for its buffer": sent_before_it_is_made,
    "something waits for what comes later": wait_for_the_future,
    **{f"a Load has another {name}": loaded_otherwise(name) for name in ("part", "parts", "index")},
    "a Load has another origin": loaded_otherwise("origin"),
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


def test_the_plans_are_accepted_as_they_are() -> None:
    for _, compiled in pool():
        check(compiled.dag, compiled.plans)


@pytest.mark.parametrize("name", SLIPS)
def test_plans_with_a_slip_are_refused(name: str) -> None:
    found = list(mutants(SLIPS[name], EXAMPLES))

    wrongly = [plans for _, compiled, plans in found if accepted(compiled, plans)]

    assert len(found) >= 100
    assert not wrongly, f"{len(wrongly)} of {len(found)} are accepted"


def any_slip(plans: Plans, random: Random) -> Plans | None:
    """An instruction moved, or any field of it taken from another: often wrong, at times not."""
    plan, at = some(plans, random, *ACTIONS, Keep, Load, Free) or (None, 0)
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


def test_what_is_accepted_computes_what_plain_training_computes() -> None:
    found = [each for each in mutants(any_slip, 600) if accepted(each[1], each[2])]

    wrong = [plans for program, _, plans in found if not is_right(program, plans)]

    assert len(found) > 20
    assert not wrong, f"{len(wrong)} of {len(found)} accepted ones are wrong"


def is_right(program: Program, plans: Plans) -> bool:
    right = expected(program.model, program.microbatches, program.clip, 1)
    try:
        return all(executed(program.model, plans, when, 1) == right for when in (EARLY, LATE))
    except (Wrong, ValueError):
        return False


def crossed(plan: Plan, peers: dict[int, int]) -> Plan:
    code = [
        replace(one, peer=peers[one.peer]) if isinstance(one, Send | Recv) else one
        for one in plan.instructions
    ]
    return replace(plan, instructions=tuple(code))


def test_replicas_that_exchange_their_data_are_refused() -> None:
    """Every send meets a receive of the same transfer, but of the other replica."""
    places = [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])]
    compiled = compile_strategy(frozen(chain(2)), [*places, Split("MB", 2)])

    plans = tuple(crossed(plan, {0: 2, 2: 0, 1: 3, 3: 1}) for plan in compiled.plans)

    assert accepted(compiled, compiled.plans)
    assert not accepted(compiled, plans)


def refusal(compiled: Compiled, plans: Plans) -> str:
    with pytest.raises(PlanError) as refused:
        check(compiled.dag, plans)
    return str(refused.value)


def two_devices() -> Compiled:
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]
    return compile_strategy(chain(2), places)


def test_a_refusal_shows_the_device_and_the_instruction() -> None:
    compiled = two_devices()
    plan = compiled.plan(1)
    (at,) = [k for k in positions(plan, Run) if plan.instructions[k].phase == "F"]

    text = refusal(compiled, changed(compiled.plans, plan, at, waits=()))

    assert text == (
        "device 1: h0>1 is read before it has arrived\n"
        "       0 recv    h0>1 from 0 on pp\n"
        "       1 load    y\n"
        "  >    2 run     PP1:F (w:PP1, h0>1, y) -> loss, saved:PP1\n"
        "       3 load    seed\n"
        "       4 run     PP1:B (w:PP1, h0>1, y, saved:PP1, seed) -> d:h0/PP1, g:PP1/PP1\n"
        f"  fix: {BUG}"
    )


def test_a_deadlock_shows_who_waits_for_what() -> None:
    compiled = two_devices()
    plan = compiled.plan(0)
    (at,) = positions(plan, Send)
    order = [k for k in range(len(plan.instructions)) if k != at]
    code = rearranged(plan.instructions, order)

    text = refusal(compiled, with_code(compiled.plans, 0, code))

    assert text == (
        "plans: these devices wait for each other for ever\n"
        "    device 0 at «run     PP0:B (w:PP0, x, saved:PP0, d:h0/PP1>0) -> g:PP0/PP0  after 0»"
        " waits for «recv    d:h0/PP1>0 from 1 on pp»\n"
        "    device 1 at «run     PP1:F (w:PP1, h0>1, y) -> loss, saved:PP1  after 0»"
        " waits for «recv    h0>1 from 0 on pp»\n"
        f"  fix: {BUG}"
    )
