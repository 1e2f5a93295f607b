"""The check rejects plans that deadlock or compute something else: many mutants of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from draws import drawn, draws, one_of
from plan.devices import positions
from plan.mutants import (
    Plans,
    Programs,
    alone,
    changed,
    mutants,
    replicated,
)  # fmt: skip
from plan.mutation_checks import accepted, any_mutation, is_right, must_be_refused
from plan.mutations import MUTATIONS
from plan.replica_mutations import REPLICA_MUTATIONS
from synthetic import chain, frozen

from piper.directives import Place, Replicate, Split
from piper.errors import BUG, PlanError
from piper.ir.filters import where
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.check.check import check
from piper.plan.instructions import (
    Gather,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
)  # fmt: skip

EXAMPLES = draws(15, 105)


def test_the_plans_are_accepted_as_they_are() -> None:
    for _, compiled in (*alone(), *replicated()):
        check(compiled.dag, compiled.plans)


@one_of(2)
@drawn
@pytest.mark.parametrize("name", MUTATIONS)
def test_plans_with_a_mutation_are_refused(name: str) -> None:
    found = list(mutants(MUTATIONS[name], alone(), EXAMPLES))

    must_be_refused(found, at_least=EXAMPLES - 5)


@one_of(3)
@drawn
@pytest.mark.parametrize("name", REPLICA_MUTATIONS)
def test_plans_of_replicas_with_a_mutation_are_refused(name: str) -> None:
    found = list(mutants(REPLICA_MUTATIONS[name], replicated(), EXAMPLES))

    must_be_refused(
        found, unless_right="wait" in name or "before it is there" in name, at_least=EXAMPLES - 5
    )


@one_of(2)
@pytest.mark.parametrize(("programs", "count"), [(alone, 300), (replicated, 400)])
def test_what_is_accepted_computes_what_plain_training_computes(
    programs: Callable[[], Programs], count: int
) -> None:
    found = [
        each for each in mutants(any_mutation, programs(), count) if accepted(each[1], each[2])
    ]

    wrong = [plans for program, _, plans in found if not is_right(program, plans)]

    assert len(found) > 20
    assert not wrong, f"{len(wrong)} of {len(found)} accepted ones are wrong"


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


def one_stage_of_a_pipeline(zero: int) -> tuple[Compiled, Plan]:
    """The last of two stages, on two devices each."""
    places = [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])]
    replicates = [Replicate(where(PP=0), [0, 2]), Replicate(where(PP=1), [1, 3], zero)]
    compiled = compile_strategy(chain(2), [*places, *replicates])
    return compiled, compiled.plan(1)


def test_a_wait_on_one_stream_is_no_wait_on_another() -> None:
    """A backward makes what is sent and what is reduced; both wait for it, on their own streams."""
    compiled, plan = one_stage_of_a_pipeline(zero=2)
    (at,) = positions(plan, Reduce)
    (sent,) = positions(plan, Send)

    plans = changed(compiled.plans, plan, at, waits=())

    assert sent < at and plan.instructions[sent].waits == plan.instructions[at].waits
    assert not accepted(compiled, plans)


def test_a_buffer_with_a_negative_number_is_refused() -> None:
    compiled, plan = one_stage_of_a_pipeline(zero=3)
    (at,) = positions(plan, Gather)

    plans = changed(compiled.plans, plan, at, buffer=-1)

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
        "device 1: h0>1 is read before it is written\n"
        "  *    0 recv    h0>1 from 0 on pp\n"
        "       1 load    y\n"
        "  >    2 run     PP1:F (w:PP1, h0>1, y) -> loss, saved:PP1\n"
        "       3 load    seed\n"
        f"  fix: {BUG}"
    )
