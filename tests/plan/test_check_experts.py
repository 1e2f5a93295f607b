"""Plans with experts that would hang or compute something else are refused."""

from __future__ import annotations

import pytest
from draws import drawn, draws, one_of
from plan.expert_mutations import EXPERT_MUTATIONS
from plan.mutants import mutants, with_experts
from plan.mutation_checks import accepted, any_mutation, is_right, must_be_refused

from piper.plan.check.check import check

EXAMPLES = draws(30, 100)
OFTEN_HARMLESS = ("a buffer ends while it is exchanged, a wait is missing",)  # readers waited, too


def test_the_plans_are_accepted_as_they_are() -> None:
    for _, compiled in with_experts():
        check(compiled.dag, compiled.plans)


@one_of(8)
@drawn
@pytest.mark.parametrize("name", EXPERT_MUTATIONS)
def test_plans_with_a_mutation_are_refused(name: str) -> None:
    found = list(mutants(EXPERT_MUTATIONS[name], with_experts(), EXAMPLES))

    wait = "wait" in name or "before it is there" in name
    must_be_refused(found, wait, EXAMPLES, 1.0 if name in OFTEN_HARMLESS else 0.25)


def test_what_is_accepted_computes_what_one_device_computes() -> None:
    found = [m for m in mutants(any_mutation, with_experts(), 350) if accepted(m[1], m[2])]

    wrong = [plans for program, _, plans in found if not is_right(program, plans)]

    assert len(found) > 20
    assert not wrong, f"{len(wrong)} of {len(found)} accepted ones are wrong"
