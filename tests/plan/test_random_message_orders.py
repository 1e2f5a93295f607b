"""Random strategies with random orders of messages, updates and passes on top."""

from __future__ import annotations

from random import Random

import pytest
from draws import drawn as drawn_more
from draws import draws, one_of
from message_orders import Named
from plan.devices import EARLY, LATE, executed
from plan.expert_programs import random_experts
from plan.numbers import expected
from plan.programs import Program, random_program
from plan.unequal_programs import random_unequal

from piper.directives import Directive
from piper.errors import DirectiveError, PassError
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.check.hardware_queues import first_blocked

STEPS = 2
BUFFERS = (
    "gather_buffers", "they use the same gather buffer", "GATHER", "cannot wait for the gather",
)  # fmt: skip


def compiled(program: Program, directives: list[Directive]) -> Compiled:
    return compile_strategy(program.model, directives, clip=program.clip)


def drawn(base: Compiled, random: Random) -> list[Directive]:
    named = Named(base.dag, random)
    anywhere = random.choice([False, True])
    found = [named.drawn(random.choice([2, 3, 4]), anywhere) for _ in range(random.choice([1, 2]))]
    return [order for order in found if order]


def must_be_right(program: Program, random: Random) -> None:
    """One total order in time is behind all orders drawn, so only buffers can be in the way."""
    base = compiled(program, program.directives)
    orders = drawn(base, random)
    try:
        found = compiled(program, [*program.directives, *orders])
    except (DirectiveError, PassError) as refused:
        assert any(word in str(refused) for word in BUFFERS), refused
        return
    right = expected(program.model, program.parts, program.clip, STEPS, program.feeds)
    for when in (EARLY, LATE):
        assert executed(program.model, found.plans, when, STEPS, program.feed_of) == right
    few = compile_strategy(
        program.model, [*program.directives, *orders], clip=program.clip, by_role=True
    )
    assert few.device_plans == found.plans
    if first_blocked(base.plans) is None:
        assert first_blocked(found.plans) is None


@one_of(2)
@drawn_more
@pytest.mark.parametrize("seed", range(draws(25, 200)))
def test_any_order_that_the_dataflow_allows_computes_the_same(seed: int) -> None:
    random = Random(seed)

    must_be_right(random_program(random, random.randint(1, 4), random.randint(1, 4)), random)


@one_of(2)
@drawn_more
@pytest.mark.parametrize("seed", range(draws(5, 50)))
def test_the_same_with_experts(seed: int) -> None:
    random = Random(seed)

    must_be_right(random_experts(random, random.randint(1, 2), 2, random.choice([2, 4])), random)


@one_of(2)
@drawn_more
@pytest.mark.parametrize("seed", range(draws(8, 80)))
def test_the_same_with_stages_on_different_numbers_of_devices(seed: int) -> None:
    random = Random(seed)

    must_be_right(random_unequal(random), random)


@drawn_more
@pytest.mark.parametrize("seed", range(draws(8, 80)))
def test_an_order_against_the_dataflow_is_refused(seed: int) -> None:
    random = Random(seed)
    program = random_program(random, random.randint(1, 4), random.randint(1, 4), copies=2)
    order = Named(compiled(program, program.directives).dag, random).against()
    if order is None:
        return  # nothing has an end on the same device

    with pytest.raises((DirectiveError, PassError)) as refused:
        compiled(program, [*program.directives, order])

    message = str(refused.value)
    assert "these wait for each other" in message or "'GATHER') matches nothing" in message
