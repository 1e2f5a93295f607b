"""Memory over time agrees with its peak, and says what holds it."""

from __future__ import annotations

import pytest
from synthetic import chain

from piper.job.compile.compiler import compile_strategy
from piper.plan.analyse.memory import holders, lasting, peak, timeline
from piper.plan.analyse.trace import SIMULATED, Span, Trace
from piper.strategies import BUILDERS


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv"])
def test_the_worst_moment_is_the_peak(name: str) -> None:
    stages = 4 if name == "zbv" else 2
    compiled = compile_strategy(chain(stages), BUILDERS[name](pp=2, microbatches=4).directives)

    for plan in compiled.plans:
        found, fixed = peak(compiled.dag, plan), dict(lasting(compiled.dag, plan, 2.0))
        moments = timeline(compiled.dag, plan)
        worst = max(moments, key=lambda moment: sum(moment.held.values()))

        assert sum(worst.held.values()) + sum(fixed.values()) == found.total
        assert [m.at for m in moments] == sorted({m.at for m in moments})


def test_holders_are_what_is_held() -> None:
    compiled = compile_strategy(chain(2), BUILDERS["gpipe"](pp=2, microbatches=4).directives)
    plan = compiled.plan(0)
    last_forward = max(
        k for k, one in enumerate(plan.instructions) if getattr(one, "phase", None) == "F"
    )

    rows = holders(compiled.dag, plan, last_forward)

    assert {name.partition("@")[2] for name, _, _ in rows} >= {"0", "1", "2", "3"}
    assert [size for _, _, size in rows] == sorted((size for _, _, size in rows), reverse=True)


def test_a_trace_lasts_from_the_first_to_the_last() -> None:
    trace = Trace("x", SIMULATED, {0: (Span(0, 0.5, 1.0, 2.0),), 1: (Span(0, 1.0, 1.0, 4.5),)})

    assert trace.seconds == 4.0
