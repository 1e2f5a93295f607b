"""A node that does not fit its region is found, whatever is wrong with it, after every rewrite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from random import Random

import pytest
from draws import drawn, draws, one_of
from ir.mutations import KINDS, Sites, changed
from plan.expert_programs import random_experts
from plan.programs import Program, random_program, random_replicates, with_offloads
from synthetic import chain as chain_of

from piper.costs import Costs
from piper.directives import Place, apply
from piper.errors import BUG, DirectiveError, Problem
from piper.ir import rules
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.nodes import Compute
from piper.ir.rules import GATHERED, Rule
from piper.ir.training import Argument, training_dag
from piper.names import NodeId
from piper.passes.pass_pipeline import steps

SHAPES = (
    rules.every_node_fits_its_region,
    rules.every_message_fits_what_it_carries,
    rules.every_update_has_all_gradients,
)
WHOLE = rules.parameters_are_whole_where_they_are_used
EACH = draws(25, 160)  # mutants of every kind
SEEDS = range(draws(12, 60))
SKIPS = ((0, 2), (0, 3), (1, 3))


def program(seed: int) -> Program:
    found = plain_program(seed)
    return with_offloads(found, Random(seed)) if seed % 2 else found


def plain_program(seed: int) -> Program:
    random = Random(seed)
    if seed % 3 == 2:
        return skipping(random)
    if seed % 3:
        return random_program(random, random.randint(1, 4), random.randint(1, 4))
    return random_experts(random, random.randint(1, 2), random.randint(1, 3), random.choice([2, 4]))


def skipping(random: Random) -> Program:
    """Gradients and tied parameters that several regions elsewhere contribute to, sent as sums."""
    model = chain_of(4, SKIPS, tied=True)
    copies = random.choice([1, 2, 4])
    blank = Program(model, device_of=(0, 1, 1, 1), microbatches=3, copies=copies)
    return replace(blank, replicates=random_replicates(blank, random))


@cache
def stages(seed: int) -> tuple[tuple[Sites, tuple[Rule, ...]], ...]:
    """A random program after its directives and after each pass, and what must hold there."""
    one = program(seed)
    dag = training_dag(one.model, one.clip)
    half = apply(one.directives[: len(one.directives) // 2], dag)
    found = [Sites(dag), Sites(half), Sites(apply(one.directives, dag))]
    for _, step, checked in steps(Costs()):
        last = found[-1]
        found.append(Sites(step(last.dag), last.gathered or checked is GATHERED))
    return tuple((s, (*SHAPES, WHOLE) if s.gathered else SHAPES) for s in found)


def problems(dag: Dag, checked: tuple[Rule, ...]) -> list[Problem]:
    return [problem for rule in checked for problem in rule(dag)]


def mutants(kind: Callable[[Sites, Random], Dag | None], count: int) -> Iterator[tuple[Dag, ...]]:
    random = Random(kind.__name__)
    while count:
        sites, checked = random.choice(stages(random.choice(SEEDS)))
        wrong = kind(sites, random)
        if wrong is not None:
            count -= 1
            yield sites.dag, wrong, checked


def is_named(dag: Dag, what: str) -> bool:
    """Whether a message says which node, of which region or bucket, and which argument."""
    node = dag.nodes[max((n for n in dag.nodes if what.startswith(f"{n} ")), key=len)]
    if isinstance(node, Compute):
        arguments = [*Argument, "output", "gradient of input", "gradient of bucket"]
        return f"of {node.region}" in what and any(word in what for word in arguments)
    values = {*node.writes, *chain.from_iterable(node.reads), *dag.model.buckets}
    return any(value in what.removeprefix(node.id) for value in values)


@one_of(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_directives_and_passes_make_fits(seed: int) -> None:
    for sites, checked in stages(seed):
        assert not problems(sites.dag, checked)


@one_of(2)
@drawn
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_mutation_is_found_and_named(kind: Callable[[Sites, Random], Dag | None]) -> None:
    for right, wrong, checked in mutants(kind, EACH):
        found = problems(wrong, checked)

        assert found, changed(right, wrong)
        assert any(is_named(wrong, problem.what) for problem in found)


@dataclass(frozen=True)
class Slip:
    """A directive with a bug: a backward loses what its forward saved."""

    def rewrite(self, dag: Dag) -> Dag:
        node = dag.nodes[NodeId("PP0:B")]
        return dag.with_nodes([replace(node, reads=node.reads[:-1])])


def test_a_directive_with_a_bug_is_found_out_at_once() -> None:
    with pytest.raises(DirectiveError) as refused:
        apply([Place(where(), [0]), Slip()], training_dag(chain_of(1)))

    assert str(refused.value) == (
        "slip (directive 2 of 2): PP0:B reads 4 values (expected 5 in B of PP0: parameter bucket "
        f"0, input 0, input 1, saved, gradient of output 0)\n  fix: {BUG}"
    )
