"""Any legal strategy with experts computes what one device with all experts computes."""

from __future__ import annotations

from random import Random

import pytest
from draws import drawn, draws, every, one_of
from hypothesis import given, settings
from plan.devices import LATE, executed
from plan.exactness import must_be_right
from plan.expert_programs import expert_programs, random_experts, scheduled
from plan.numbers import expected
from plan.programs import Program
from synthetic import moe_chain

from piper.directives import Place
from piper.directives.order import Ahead
from piper.job.compile.compiler import compile_strategy
from piper.strategies import BUILDERS


@drawn
@settings(max_examples=draws(12, 140))
@given(expert_programs())
def test_any_legal_strategy_computes_what_one_device_computes(program: Program) -> None:
    must_be_right(program)


@one_of(2)
@pytest.mark.parametrize("seed", range(8))
def test_any_total_order_that_the_dataflow_allows_is_accepted(seed: int) -> None:
    random = Random(seed)

    must_be_right(random_experts(random, 2, 3, random.choice([2, 4]), all_ordered=True))


WAYS = [(2, 2, 2, True), (4, 2, 3, True), (2, 2, 1, "pairs")]
EVERY = [(name, *way) for name in BUILDERS for way in WAYS]


@one_of(2)
@pytest.mark.parametrize(("name", "dp", "ways", "zero", "ahead"), every(2, EVERY))
def test_every_schedule_takes_experts(
    name: str, dp: int, ways: int, zero: int, ahead: Ahead
) -> None:
    """Replicas of DualPipe go two by two through the same devices."""
    together = 2 if name == "dualpipe" else 1
    strategy = scheduled(name, 4, dp // together, ways, zero=zero, ahead=ahead)
    stages = sum(isinstance(one, Place) for one in strategy)
    feeds, parts = dp // together, strategy.microbatches * together
    model = moe_chain(stages, experts=2)

    plans = compile_strategy(model, strategy).plans

    feed_of = {plan.device: plan.device // 2 for plan in plans}
    assert executed(model, plans, LATE, 1, feed_of) == expected(model, parts, False, 1, feeds)
