"""Compute takes longer exactly while messages of its device are in flight."""

from __future__ import annotations

import pytest
from synthetic import chain

from piper.costs import Costs
from piper.costs.costs import Host
from piper.costs.links import Link, Network
from piper.errors import StrategyError
from piper.job.compile.compiler import compile_strategy
from piper.plan.analyse.interference import interference
from piper.plan.analyse.trace import Span
from piper.plan.instructions import Instruction, Plan, Run, is_message
from piper.sim.clock import Simulated, simulate
from piper.strategies import BUILDERS

SECONDS = {"F": 1.0, "B": 2.0, "BI": 1.25, "BW": 0.75}
SLOW = Network(2, Link(100.0, 0.3), Link(100.0, 0.3))  # messages take about as long as compute
CASES = [("1f1b", {"dp": 2, "zero": 2}), ("zbv", {}), ("gpipe", {"dp": 2, "zero": 3})]


def price(one: Instruction) -> float:
    return SECONDS[one.phase] if isinstance(one, Run) else 0.0


def simulated(name: str, options: dict[str, int], beside: float, blocks: bool) -> Simulated:
    stages = 4 if name == "zbv" else 2
    strategy = BUILDERS[name](pp=2, microbatches=4, **options)
    plans = compile_strategy(chain(stages), strategy.directives).plans
    return simulate(plans, price, SLOW, Host(blocks=blocks, beside=beside))


def covered(span: Span, messages: list[Span]) -> float:
    """How long at least one message was in flight during a span: sums of elementary intervals."""
    edges = sorted({t for m in messages for t in (m.start, m.end)} | {span.start, span.end})
    total = 0.0
    for first, last in zip(edges, edges[1:], strict=False):
        inside = span.start <= first and last <= span.end
        if inside and any(m.start <= first and last <= m.end for m in messages):
            total += last - first
    return total


def runs(found: Simulated) -> list[tuple[Run, Span, list[Span]]]:
    def of(plan: Plan) -> list[tuple[Run, Span, list[Span]]]:
        spans = found.trace.spans[plan.device]
        messages = [span for span in spans if is_message(plan.instructions[span.at])]
        pairs = ((plan.instructions[span.at], span) for span in spans)
        return [(one, span, messages) for one, span in pairs if isinstance(one, Run)]

    return [found for plan in found.plans for found in of(plan)]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_time_of_a_run_follows_from_the_messages_beside_it(
    name: str, options: dict[str, int], blocks: bool
) -> None:
    beside, some = 1.75, 0.0

    for one, span, messages in runs(simulated(name, options, beside, blocks)):
        over = covered(span, messages)
        alone = span.end - span.start - over + over / beside
        assert alone == pytest.approx(SECONDS[one.phase])
        some += over

    assert some > 1.0


def test_without_a_slowdown_runs_take_what_they_cost() -> None:
    found = simulated("1f1b", {"dp": 2, "zero": 2}, 1.0, False)

    assert all(s.end - s.start == pytest.approx(SECONDS[one.phase]) for one, s, _ in runs(found))


def test_a_simulated_step_shows_the_slowdown_that_it_was_given() -> None:
    found = simulated("1f1b", {"dp": 2, "zero": 2}, 1.5, False)

    seen = interference(found.plans, [found.trace])

    assert seen and all(1.2 < one.slowdown <= 1.5 + 1e-9 for one in seen)


def test_costs_carry_it() -> None:
    costs = Costs.from_json(Costs(beside=1.5).to_json())

    assert costs.host.beside == 1.5 and Costs().host.beside == 1.0
    with pytest.raises(StrategyError, match="beside"):
        Costs(beside=0.0)
