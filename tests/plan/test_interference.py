"""Compute beside messages is compared with the same compute alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from synthetic import chain

from piper.job.compile.compiler import compile_strategy
from piper.plan.analyse.interference import Pending, interference, interference_text
from piper.plan.analyse.trace import MEASURED, Span, Trace
from piper.plan.instructions import Plan, Run, is_message
from piper.strategies import BUILDERS

SLOWER = {0: 1.0, 1: 1.25, 2: 1.5, 3: 2.0}


def plans() -> list[Plan]:
    compiled = compile_strategy(chain(2), BUILDERS["1f1b"](pp=2, microbatches=8).directives)
    return list(compiled.plans)


def step(plan: Plan, levels: dict[int, int], late: bool = False) -> list[Span]:
    """Each run takes as long as its phase does beside so many messages, which cover it exactly."""
    code, now, found = plan.instructions, 0.0, list[Span]()
    messages = [k for k, one in enumerate(code) if is_message(one)]
    for k, one in enumerate(code):
        if isinstance(one, Run):
            base = 1.0 if one.phase == "F" else 2.0
            end = now + base * SLOWER[levels[k]]
            found.append(Span(k, now, now, end))
            found += [Span(m, now, now, end, late) for m in messages[: levels[k]]]
            now = end + 1.0
    return found


def run_positions(plan: Plan) -> list[int]:
    return [k for k, one in enumerate(plan.instructions) if isinstance(one, Run)]


def traced(levels: dict[int, int], late: bool = False) -> tuple[Pending, ...]:
    found = plans()
    spans = {plan.device: tuple(step(plan, levels, late)) for plan in found}
    return interference(found, [Trace("x", MEASURED, spans)])


@pytest.mark.parametrize("seed", range(4))
def test_the_slowdown_is_found_for_each_number_of_messages(seed: int) -> None:
    draw = random.Random(seed)
    both = {k for plan in plans() for k in run_positions(plan)}
    levels = {k: draw.choice((0, 0, 1, 2, 3)) for k in both}

    found = traced(levels)

    assert {one.messages for one in found} == {1, 2, 3}
    for one in found:
        assert one.slowdown == pytest.approx(SLOWER[one.messages])
        assert one.runs == sum(levels[k] == one.messages for p in plans() for k in run_positions(p))


def test_more_messages_than_are_told_apart_count_as_the_most() -> None:
    (plan, _) = plans()
    first, *rest = run_positions(plan)
    spans = step(plan, {first: 3, **dict.fromkeys(rest, 0)})
    more = [replace(span, at=span.at) for span in spans if is_message(plan.instructions[span.at])]

    found = interference([plan], [Trace("x", MEASURED, {plan.device: (*spans, *more)})])

    assert [(one.messages, one.runs) for one in found] == [(3, 1)]


def test_messages_that_end_at_an_unknown_time_tell_nothing() -> None:
    both = {k for plan in plans() for k in run_positions(plan)}
    levels = {k: index % 2 for index, k in enumerate(sorted(both))}

    assert traced(levels) and traced(levels, late=True) == ()


def test_messages_that_cover_a_part_of_a_run_count_by_time() -> None:
    (plan, _) = plans()
    code = plan.instructions
    message = next(k for k, one in enumerate(code) if is_message(one))
    forwards = [k for k in run_positions(plan) if code[k].phase == "F"]  # type: ignore[union-attr]
    spans = [Span(k, 10.0 * i, 10.0 * i, 10.0 * i + 1 + i) for i, k in enumerate(forwards[:3])]
    spans += [Span(message, 0, 10.9, 11.3), Span(message, 0, 20.0, 22.0)]  # 0.2 and 2/3 of a run

    found = interference([plan], [Trace("x", MEASURED, {plan.device: tuple(spans)})])

    assert found == (Pending(1, 1, pytest.approx(3.0 / 1.5)),)


def test_without_both_there_is_no_sentence() -> None:
    both = {k for plan in plans() for k in run_positions(plan)}

    assert traced(dict.fromkeys(both, 0)) == traced(dict.fromkeys(both, 1)) == ()
    assert interference_text(()) == ""


def test_noise_is_no_slowdown() -> None:
    assert interference_text([Pending(1, 9, 0.89), Pending(2, 4, 1.04)]) == ""
