"""Plans come to their end wherever streams share queues."""

from dataclasses import replace

import pytest
from draws import one_of
from synthetic import chain

from piper import strategies
from piper.ir.model import Model
from piper.job.compile.compiler import compile_strategy
from piper.plan.check.hardware_queues import first_blocked
from piper.plan.instructions import Plan, Recv
from piper.plan.lower.lowering import lower

CASES = [
    ("interleaved-zb", {"pp": 4}, 8, False),
    ("interleaved-zb", {"pp": 3, "dp": 2, "zero": 3}, 8, True),
    ("dualpipe", {"pp": 2, "dp": 2, "zero": 3}, 4, True),
    ("dualpipe", {"pp": 2, "dp": 2, "zero": 2}, 8, True),
]


@pytest.mark.parametrize(("name", "options", "parts", "tied"), CASES)
def test_what_would_hang_with_one_queue_is_lowered_with_care(
    name: str, options: dict[str, int], parts: int, tied: bool
) -> None:
    stages = options["pp"] * (2 if name == "interleaved-zb" else 1)
    strategy = strategies.BUILDERS[name](microbatches=parts, **options)

    compiled = compile_strategy(chain(stages, tied=tied), strategy.directives)

    assert first_blocked(lower(compiled.dag)) is not None
    assert first_blocked(compiled.plans) is None


@one_of(3)
@pytest.mark.parametrize("name", sorted(strategies.BUILDERS))
@pytest.mark.parametrize("zero", [0, 3])
def test_every_schedule_ends_with_one_queue(name: str, zero: int) -> None:
    strategy = strategies.BUILDERS[name](pp=2, dp=2, zero=zero, microbatches=4)

    compiled = compile_strategy(model_for(name), strategy.directives)

    assert first_blocked(compiled.plans) is None


def test_two_receives_in_a_row_that_the_peer_cannot_serve_stop_a_device() -> None:
    compiled = compile_strategy(
        chain(2), strategies.BUILDERS["1f1b"](pp=2, microbatches=4).directives
    )
    first, second = compiled.plans
    early = Plan(first.device, first.states, moved_to_front(first), first.buffers)

    assert first_blocked(compiled.plans) is None
    assert first_blocked([early, second]) is not None


def moved_to_front(plan: Plan) -> tuple:
    """All receives first; they are waited for by number, so every number is moved along."""
    order = sorted(range(len(plan.instructions)), key=lambda k: not is_recv(plan, k))
    new = {old: k for k, old in enumerate(order)}
    return tuple(
        with_waits(plan.instructions[k], tuple(new[w] for w in plan.instructions[k].waits))
        for k in order
    )


def with_waits(one, waits: tuple[int, ...]):
    return replace(one, waits=waits) if one.waits else one


def is_recv(plan: Plan, k: int) -> bool:
    return isinstance(plan.instructions[k], Recv)


def model_for(name: str) -> Model:
    return chain(4 if name in ("interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev") else 2)
