"""Devices with several replicas: plans compute what plain training computes."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from draws import drawn, draws, every, one_of
from plan.devices import EARLY, LATE, executed
from plan.mutants import mutants
from plan.mutation_checks import accepted, any_mutation, is_right, must_be_refused
from plan.mutations import MUTATIONS
from plan.numbers import expected
from plan.replica_mutations import REPLICA_MUTATIONS
from plan.unequal_programs import random_unequal, unequal
from synthetic import chain
from unequal import Lists, scheduled

from piper.directives import Order, Place, Replicate, Split
from piper.ir.filters import where
from piper.ir.placement.replicas import replicas
from piper.job.compile.compiler import compile_strategy
from piper.plan.instructions import Run, Send, line
from piper.strategies import BUILDERS

STEPS = 2
EVERY = {**MUTATIONS, **REPLICA_MUTATIONS}
PLAIN = (
    "a Run is dropped", "a Send is dropped", "a Recv is dropped", "a Run is doubled",
    "a Send is doubled", "a Recv is doubled", "a Add is dropped", "a Load is dropped",
    "two Runs are swapped", "two Sends are swapped", "two Recvs are swapped",
    "a Send goes to another device", "a Recv comes from another device", "a Run is another node",
    "a Send is another transfer", "a Recv is another transfer", "a Send reads another buffer",
    "a Run reads another buffer", "an Add takes another buffer", "a Load has another part",
    "a buffer ends before its last use", "a Reduce is dropped", "a Reduce is of another buffer",
)  # fmt: skip


def compute(seeds: range) -> None:
    for seed in seeds:
        program = random_unequal(Random(seed))
        plans = compile_strategy(program.model, program.directives, clip=program.clip).plans
        right = expected(program.model, program.parts, program.clip, STEPS, program.feeds)
        for when in (EARLY, LATE):
            assert executed(program.model, plans, when, STEPS, program.feed_of) == right, seed
        few = compile_strategy(program.model, program.directives, clip=program.clip, by_role=True)
        assert few.device_plans == plans, seed


def test_any_unequal_strategy_computes_what_plain_training_computes() -> None:
    compute(range(40))


LISTS = ({0: [0, 2], 1: [1]}, {0: [0], 1: [1, 2, 3]}, {0: [0, 0, 1], 1: [2, 1, 1]})


@one_of(4)
@pytest.mark.parametrize(("lists", "schedule"), every(3, product(LISTS, BUILDERS)))
def test_every_schedule_and_level_computes_what_plain_training_computes(
    schedule: str, lists: Lists
) -> None:
    model = chain(4, tied=True)
    for zero in range(4):
        strategy = scheduled(schedule, lists, zero=zero)
        known = replicas(place.devices for place in strategy if isinstance(place, Place))
        plans = compile_strategy(model, strategy.directives).plans
        parts, feeds = strategy.microbatches * len(known.feeds[0]), len(known.feeds)
        fed = {plan.device: known.feed(plan.device) for plan in plans}
        for when in (EARLY, LATE):
            right = expected(model, parts, False, STEPS, feeds)
            assert executed(model, plans, when, STEPS, fed) == right, zero


MESSAGES = {
    "a send before a forward": [[where(PP=0, MB=0, PASS="SEND")], [where(PP=0, MB=1, PASS="F")]],
    "a forward before a send": [[where(PP=0, MB=1, PASS="F")], [where(PP=0, MB=0, PASS="SEND")]],
    "a receive before a forward": [[where(PP=1, MB=1, PASS="RECV")], [where(PP=1, MB=0, PASS="F")]],
}


@one_of(2)
@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("lists", [[[0, 2], [1], [1]], [[0, 0, 1], [2, 1, 1], [0, 0, 1]]], ids=str)
def test_orders_may_name_messages_of_unequal_replicas(name: str, lists: list[list[int]]) -> None:
    model, known = chain(3, tied=True), replicas(lists)
    places = [Place(where(PP=s), row) for s, row in enumerate(lists)]
    keep = [Replicate(where(PP=s), list(dict.fromkeys(row))) for s, row in enumerate(lists)]
    strategy = [*places, *keep, Split("MB", 2), Order(MESSAGES[name])]

    plans = compile_strategy(model, strategy).plans

    right = expected(model, 2 * len(known.feeds[0]), False, STEPS, len(known.feeds))
    fed = {plan.device: known.feed(plan.device) for plan in plans}
    for when in (EARLY, LATE):
        assert executed(model, plans, when, STEPS, fed) == right


@pytest.mark.soak
def test_many_unequal_strategies_compute_what_plain_training_computes() -> None:
    compute(range(100, 5000))


@one_of(4)
@drawn
@pytest.mark.parametrize("name", PLAIN)
def test_mutated_plans_are_refused(name: str) -> None:
    count = draws(12, 20)

    must_be_refused(list(mutants(EVERY[name], unequal(), count)), at_least=count)


def test_what_is_accepted_computes_what_plain_training_computes() -> None:
    found = [each for each in mutants(any_mutation, unequal(), 80) if accepted(each[1], each[2])]

    wrong = [plans for program, _, plans in found if not is_right(program, plans)]

    assert len(found) > 5
    assert not wrong, f"{len(wrong)} of {len(found)} accepted ones are wrong"


def lines(devices: list[list[int]], device: int, *kinds: type) -> list[str]:
    """What a device does of these kinds, for a chain with one microbatch."""
    places = [Place(where(PP=s), row) for s, row in enumerate(devices)]
    keep = [
        Replicate(where(PP=s), list(dict.fromkeys(row)))
        for s, row in enumerate(devices)
    ]  # fmt: skip
    compiled = compile_strategy(chain(len(devices)), [*places, *keep, Split("MB", 1)])
    plan = next(plan for plan in compiled.plans if plan.device == device)
    return [line(one) for one in plan.instructions if isinstance(one, kinds)]


def test_a_device_sends_what_a_replica_made_before_it_runs_the_next() -> None:
    done = lines([[0], [1, 2]], 0, Run, Send)

    assert [text.partition(" (")[0].partition(" on ")[0] for text in done[:4]] == [
        "run     PP0:F@0", "send    h0@0 to 1", "run     PP0:F@0#1", "send    h0@0#1 to 2",
    ]  # fmt: skip


def test_a_replica_that_stays_on_its_device_sends_nothing() -> None:
    lists = [[0, 1], [0]]

    assert [text.partition(" on ")[0] for text in lines(lists, 0, Send)] == [
        "send    d:h0/PP1@0#1 to 1"
    ]
    assert [text.partition(" on ")[0] for text in lines(lists, 1, Send)] == ["send    h0@0 to 0"]
