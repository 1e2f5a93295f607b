"""Programs of random strategies must compute what one device computes, exactly."""

from __future__ import annotations

from plan.devices import EARLY, LATE, executed
from plan.numbers import expected
from plan.programs import Program

from piper.job.compile.compiler import compile_strategy

STEPS = 2  # the second one sees what the first one left behind


def must_be_right(program: Program) -> None:
    plans = compile_strategy(program.model, program.directives, clip=program.clip).plans
    right = expected(program.model, program.parts, program.clip, STEPS, program.feeds)

    for when in (EARLY, LATE):
        assert executed(program.model, plans, when, STEPS, program.feed_of) == right
