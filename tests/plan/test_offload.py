"""Copies to the host and back: plans compute the same, and the check finds every wrong copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

import pytest
from draws import drawn, draws, one_of
from plan.devices import EARLY, LATE, executed, positions
from plan.expert_programs import random_experts
from plan.mutants import Mutation, Plans, Programs, at_random, changed, mutants, other
from plan.mutation_checks import must_be_refused
from plan.mutations import (
    doubled,
    dropped,
    free_before_the_last_use,
    other_shapes,
    swapped,
    wait_removed,
    wrong_buffer,
    wrong_field,
)
from plan.numbers import expected
from plan.programs import Program, random_program, with_offloads
from plan.unequal_programs import random_unequal
from synthetic import chain

from piper.costs.costs import Host
from piper.directives import Offload, Order, Place, Replicate, Split
from piper.directives.offload import What
from piper.ir.filters import where
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.names import BucketId
from piper.plan.analyse.memory import lasting, peak, timeline
from piper.plan.instructions import Fetch, Free, Gather, Plan, Run, Store, Update
from piper.sim.clock import simulate

EXAMPLES = draws(24, 60)
FOUND = EXAMPLES * 5 // 6  # at least


@cache
def offloaded() -> Programs:
    """Compiled programs with copies, half of them replicated."""
    made = []
    for seed in range(60):
        random = Random(seed)
        program = random_program(
            random, random.randint(2, 4), random.randint(2, 5), min_devices=random.randint(1, 2),
            all_ordered=True, overlapping=False, copies=1 + seed % 2,
        )  # fmt: skip
        program = with_offloads(program, random)
        found = compile_strategy(program.model, program.directives, clip=program.clip)
        if count(found, Store):
            made.append((program, found))
    return tuple(made)


def count(compiled: Compiled, kind: type) -> int:
    return sum(len(positions(plan, kind)) for plan in compiled.plans)


def test_any_legal_strategy_computes_what_plain_training_computes() -> None:
    assert len(offloaded()) > 20
    for program, compiled in offloaded():
        assert_right(program, compiled)


def assert_right(program: Program, compiled: Compiled) -> None:
    right = expected(program.model, program.parts, program.clip, 2, program.feeds)
    for when in (EARLY, LATE):
        assert executed(program.model, compiled.plans, when, 2, program.feed_of) == right


def with_experts(random: Random) -> Program:
    copies = random.choice([2, 2, 3, 4])
    return random_experts(random, random.randint(1, 3), random.randint(1, 4), copies)


@one_of(2)
@drawn
@pytest.mark.parametrize("kind", [random_unequal, with_experts])
def test_unequal_replicas_and_experts_compute_the_same(kind: Callable[[Random], Program]) -> None:
    moved = 0
    for seed in range(draws(8, 200)):
        random = Random(seed)
        program = with_offloads(kind(random), random)
        given = program.model, program.directives
        found = compile_strategy(*given, clip=program.clip)
        assert_right(program, found)
        few = compile_strategy(*given, clip=program.clip, by_role=True)
        assert few.device_plans == found.plans, seed
        moved += any(state.on_host for plan in found.plans for state in plan.states)
    assert moved


def two_swapped(kind: type) -> Mutation:
    @at_random(kind)
    def mutation(plans: Plans, random: Random, plan: Plan, a: int) -> Plans | None:
        b = other(random, positions(plan, kind), a)
        return None if b is None else swapped(plans, plan, a, b)

    return mutation


@at_random(Fetch)
def what_was_fetched_is_another_value(
    plans: Plans, random: Random, plan: Plan, at: int
) -> Plans | None:
    """Two fetches write each other's result."""
    b = other(random, positions(plan, Fetch), at)
    if b is None:
        return None
    one, two = plan.instructions[at], plan.instructions[b]
    plans = changed(plans, plan, at, value=two.value)
    plan = next(p for p in plans if p.device == plan.device)
    return changed(plans, plan, b, value=one.value)


MUTATIONS: dict[str, Mutation] = {
    **{f"a {kind.__name__} is dropped": dropped(kind) for kind in (Store, Fetch)},
    **{f"a {kind.__name__} is doubled": doubled(kind) for kind in (Store, Fetch)},
    "two Fetches bring each other's value": what_was_fetched_is_another_value,
    **{
        f"a {kind.__name__} {what}": mutation
        for kind in (Store, Fetch)
        for what, mutation in {
            "reads another buffer": wrong_buffer(kind, "value"),
            "writes another buffer": wrong_buffer(kind, "into"),
            "is another node": wrong_field(kind, "node"),
            "has other shapes": other_shapes(kind),
        }.items()
    },
    "an Update changes another optimizer's state": wrong_field(Update, "optimizer"),
    "an Update changes other parameters": wrong_field(Update, "parameters"),
    "a buffer ends before its last use": free_before_the_last_use,
}
WAITS: dict[str, Mutation] = {
    "a buffer ends while it is stored": wait_removed(Store, Free),
    "a Fetch does not wait for its Store": wait_removed(Store, Fetch),
    "a Store does not wait for what it stores": wait_removed(Run, Store),
    "a backward does not wait for its Fetch": wait_removed(Fetch, Run),
    "a Gather does not wait for its Fetch": wait_removed(Fetch, Gather),
    "a buffer ends while it is gathered": wait_removed(Gather, Free),
    "an Update does not wait for its Fetch": wait_removed(Fetch, Update),
    "a Store does not wait for its Update": wait_removed(Update, Store),
    "two Stores are swapped": two_swapped(Store),
    "two Fetches are swapped": two_swapped(Fetch),
}


@one_of(3)
@drawn
@pytest.mark.parametrize("name", MUTATIONS)
def test_plans_with_a_mutation_are_refused(name: str) -> None:
    must_be_refused(list(mutants(MUTATIONS[name], offloaded(), EXAMPLES)), at_least=FOUND)


@one_of(2)
@drawn
@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_is_refused_unless_another_one_implies_it(name: str) -> None:
    found = list(mutants(WAITS[name], offloaded(), EXAMPLES))

    must_be_refused(found, unless_right=True, at_least=FOUND, most=1.0)


# What it is for


def gpipe(*more: Offload, microbatches: int = 6) -> Compiled:
    order = [[where(MB=m, PASS="F")] for m in range(microbatches)]
    order += [[where(MB=m, PASS="B")] for m in range(microbatches)]
    return compile_strategy(
        chain(1), [Place(where(), [0]), Split("MB", microbatches), *more, Order(order)]
    )


@pytest.mark.parametrize(("ahead", "buffers"), [(0, 1), (1, 1), (1, 2), (2, 3)])
def test_a_device_holds_the_copies_of_few_passes(ahead: int, buffers: int) -> None:
    (plan,) = gpipe(Offload(where(), ahead=ahead, buffers=buffers)).plans

    held = {"saved": 0, "back": 0}
    for one in plan.instructions:
        for names, step in ((one.defines, 1), (one.ends, -1)):
            for name in names:
                kind = name.partition(":")[0]
                if kind in held:
                    held[kind] += step
        assert held["back"] <= buffers
        assert isinstance(one, Run) or held["saved"] <= max(buffers, ahead + buffers + 1)


def test_memory_of_the_device_shrinks_and_that_of_the_host_is_counted_apart() -> None:
    kept, moved = gpipe(), gpipe(Offload(where()))

    before, after = (peak(c.dag, c.plans[0]) for c in (kept, moved))

    assert before.host == 0 < after.host
    assert after.total < before.total
    assert "in host memory" in str(after)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("more", [(), ("optimizer",)])
def test_parameters_by_closed_form(zero: int, more: tuple[What, ...]) -> None:
    """Four equal layers on two replicas, one buffer: one layer, or its shard, is on the device."""
    model, shard = chain(4), 1 / (1 if zero == 0 else 2)
    order = [where(PP=min(k, 7 - k), PASS="F" if k < 4 else "B") for k in range(8)]
    shared = Replicate(where(), [0, 1], zero=zero, gather_ahead=0, gather_buffers=1)
    away = [Offload(where(), what, ahead=0, buffers=1) for what in ("parameters", *more)]
    layer = sum(spec.nbytes for spec in model.buckets[BucketId("PP0")].specs)

    found = compile_strategy(
        model, [Place(where(), [0, 1]), shared, *away, Order([[one] for one in order])]
    )

    held = peak(found.dag, found.plans[0])
    kept = dict(lasting(found.dag, found.plans[0], 2.0))
    assert kept["parameters"] == 0
    assert held.held["parameters"] <= layer * shard
    assert kept["optimizer"] == (0 if more else 2 * 4 * layer * shard)
    assert held.host == (3 if more else 1) * 4 * layer * shard
    fetched = [one for one in found.plans[0].instructions if isinstance(one, Fetch)]
    uses = 4 if zero in (1, 2) else 8  # one gather of each layer, or two passes
    again = 1  # of two uses in a row, the second finds it there
    copied = (uses + 4 - again) * layer * shard  # and the updates
    assert sum(one.copied for one in fetched if not one.bucket) == copied


def test_the_defaults_hold_two_layers_in_passes_and_three_in_updates() -> None:
    """One ahead: the next layer comes while one computes. After an update, it goes as well."""
    model = chain(6)
    layer = sum(spec.nbytes for spec in model.buckets[BucketId("PP0")].specs)
    away = [Offload(where(), what) for what in ("parameters", "optimizer")]

    found = compile_strategy(model, [Place(where(), [0]), *away])

    plan = found.plans[0]
    moments = timeline(found.dag, plan)
    passes = [one for one in moments if isinstance(plan.instructions[one.at], Run)]
    assert dict(lasting(found.dag, plan, 2.0))["optimizer"] == 0
    assert max(one.held.get("parameters", 0) for one in passes) == 2 * layer
    assert max(one.held.get("parameters", 0) for one in moments) == 3 * layer
    assert max(one.held.get("optimizer", 0) for one in moments) == 3 * 2 * layer


@pytest.mark.parametrize("blocks", [False, True])
def test_the_clock_prices_copies_by_the_link_to_the_host(blocks: bool) -> None:
    """A GPU copies beside compute, in both directions at once; a CPU copies itself."""
    (plan,) = gpipe(Offload(where())).plans
    copies = len(positions(plan, Store)) + len(positions(plan, Fetch))

    def seconds(each: float) -> float:
        prices = {Run: 1.0, Store: each, Fetch: each}
        return simulate([plan], lambda one: prices.get(type(one), 0.0), host=Host(blocks)).seconds

    assert copies == 12
    assert seconds(0.5) == (12 + copies * 0.5 if blocks else 12)
    assert seconds(3.0) > (12 + 3 * copies - 1 if blocks else 12 + 3)
