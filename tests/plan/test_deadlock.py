"""Plans that were broken by hand: what the check says about them, word by word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from plan.broken import (
    hasty,
    moved,
    ordered,
    replicas,
    replicated_pipeline,
    ring,
    swapped,
    twice,
    two_devices,
    without,
)
from plan.mutants import Plans

from piper.errors import PlanError
from piper.ir.maker import Maker
from piper.ir.nodes import Precedence
from piper.job.compile.compiler import Compiled
from piper.names import NodeId
from piper.plan.check.check import check
from piper.plan.check.excerpts import excerpts
from piper.plan.check.proof import Proof, prove
from piper.plan.instructions import Load, Plan

Golden = Callable[[str, str], None]


def refusal(compiled: Compiled, plans: Plans) -> str:
    with pytest.raises(PlanError) as refused:
        check(compiled.dag, plans)
    return str(refused.value)


def a_ring_that_hangs() -> tuple[Compiled, Plans]:
    """Device 0 sends its first stage's results only when the fourth stage has run."""
    compiled = ring()
    plans = moved(compiled.plans, 0, "send    h0@1", behind="run     PP3:F@0")
    return compiled, moved(plans, 0, "send    h0@0", behind="run     PP3:F@0")


def groups_that_hang() -> tuple[Compiled, Plans]:
    """Two collectives on two streams; each device waits for one before it comes to the other."""
    compiled = replicas()
    plans = moved(compiled.plans, 0, "update  PP1", behind="reduce  g:PP1")
    plans = moved(plans, 1, "update  PP1", behind="update  PP0")
    return compiled, moved(plans, 1, "reduce  g:PP1", behind="update  PP0")


def an_order_that_hangs() -> tuple[Compiled, Plans]:
    compiled = ordered()
    return compiled, moved(compiled.plans, 0, "send    h0@1", behind="run     PP0:B@1")


def a_send_too_few() -> tuple[Compiled, Plans]:
    compiled = two_devices()
    return compiled, without(compiled.plans, 0, "send    h0")


HANGING = [a_ring_that_hangs, groups_that_hang, an_order_that_hangs, a_send_too_few]


def test_a_ring_of_three_is_told_as_a_chain_that_ends_where_it_began() -> None:
    text = refusal(*a_ring_that_hangs())

    assert text.splitlines()[:6] == [
        "plans: deadlock: these devices wait for each other",
        "    device 0 waits, before forward of PP=3 on microbatch 0 (split: directive 6 of 6), "
        "for h2@0>0 from device 2",
        "    device 2 sends it only after forward of PP=2 on microbatch 0 (split: directive 6 of 6)"
        ", which waits for h1@0>2 from device 1",
        "    device 1 sends it only after forward of PP=1 on microbatch 0 (split: directive 6 of 6)"
        ", which waits for h0@0>1 from device 0",
        "    device 0 sends it only after forward of PP=3 on microbatch 0 (split: directive 6 of 6)"
        ", which closes the cycle",
        "    device 3 is blocked only because of this",
    ]


def test_collectives_that_wait_for_each_other_are_told_as_a_chain() -> None:
    text = refusal(*groups_that_hang())

    assert text.splitlines()[1:4] == [
        "    device 0 waits, before the update of PP1, for the all-reduce R:PP1 with device 1",
        "    device 1 joins it only after the update of PP0, which waits for the all-reduce R:PP0 "
        "with device 0",
        "    device 0 joins it only after the update of PP1, which closes the cycle",
    ]


def test_the_directive_that_ordered_it_so_is_named() -> None:
    text = refusal(*an_order_that_hangs())

    assert "before backward of PP=0 on microbatch 1 (order: directive 4 of 4), for" in text


def test_devices_that_are_checked_for_others_do_not_wait_for_these() -> None:
    """One replica of two is looked at: the other one is not missing at a reduction."""
    compiled = replicated_pipeline()
    plans = moved(compiled.plans, 0, "send    h0@1", behind="update  PP0")

    with pytest.raises(PlanError) as refused:
        check(compiled.dag, plans, compiled.roles.first)

    assert [plan.device for plan in plans] == [0, 1]
    assert str(refused.value).splitlines()[:4] == [
        "plans: deadlock: these devices wait for each other",
        "    device 0 waits, before backward of PP=0 on microbatch 1 (split: directive 5 of 5), "
        "for d:h0/PP1@1>0,2 from device 1",
        "    device 1 sends it only after forward of PP=1 on microbatch 1 (split: directive 5 of 5)"
        ", which waits for h0@1>1,3 from device 0",
        "    device 0 sends it only after backward of PP=0 on microbatch 1 (split: directive 5 of 5"
        "), which closes the cycle",
    ]


def test_a_proof_counts_what_was_seen() -> None:
    compiled = replicas()

    proof = prove(compiled.dag, compiled.plans)

    assert proof == Proof(
        devices=2, roles=2, nodes=len(compiled.dag.nodes), instructions=30, passes=8, messages=0,
        collectives=2, exchanges=0, orders=len(compiled.dag.precedences), message_orders=0,
        gradients=4, updates=4, buffers=20,
    )  # fmt: skip


@pytest.mark.parametrize(("at", "first", "last"), [(0, 0, 2), (4, 2, 6), (9, 7, 9)])
def test_an_excerpt_shows_an_instruction_with_its_neighbours(
    at: int, first: int, last: int
) -> None:
    plan = Plan(0, (), tuple(Load(f"x{k}", "batch", 0, 0, 1) for k in range(10)))

    shown = excerpts({0: plan}, (0, at)).splitlines()

    assert [row.split()[-1] for row in shown] == [f"x{k}" for k in range(first, last + 1)]
    assert [row for row in shown if row.startswith("  >")] == [f"  > {at:4} load    x{at}"]


def test_deadlocks_are_drawn(golden: Golden) -> None:
    texts = [f"{make.__name__}\n{refusal(*make())}\n" for make in HANGING]

    golden("deadlocks.txt", "\n".join(texts))


def in_two_devices(break_them: Callable[[Plans], Plans]) -> str:
    compiled = ordered()
    return refusal(compiled, break_them(compiled.plans))


def in_replicas(break_them: Callable[[Plans], Plans]) -> str:
    compiled = replicas("b", "b")
    return refusal(compiled, break_them(compiled.plans))


def against_the_order() -> str:
    """The plans of one order, and the DAG of another."""
    compiled = ordered()
    other = Precedence((NodeId("PP0:F@1"),), (NodeId("PP0:F@0"),), Maker("order", 4, 4))
    reordered = replace(compiled, dag=replace(compiled.dag, precedences=(other,)))
    return refusal(reordered, compiled.plans)


BROKEN = {
    "receives of a channel in another order": lambda: in_two_devices(
        lambda plans: swapped(plans, 1, "recv    h0@0", "recv    h0@1")
    ),
    "collectives of a group in another order": lambda: in_replicas(
        lambda plans: moved(plans, 1, "reduce  g:PP1", behind="reduce  g:PP0")
    ),
    "a buffer that is read before it is written": lambda: in_two_devices(
        lambda plans: moved(plans, 0, "load    x@1", behind="run     PP0:F@1")
    ),
    "a buffer that is freed twice": lambda: in_two_devices(
        lambda plans: twice(plans, 0, "free    d:h0/PP1@0")
    ),
    "a buffer that is freed while it is being sent": lambda: in_two_devices(
        lambda plans: hasty(plans, 0, "free    d:h0/PP1@0")
    ),
    "buffers that are never freed": lambda: in_two_devices(
        lambda plans: without(plans, 1, "free    h0@0")
    ),
    "a gradient that is missing": lambda: in_two_devices(lambda plans: without(plans, 1, "add")),
    "a gradient that is doubled": lambda: in_two_devices(lambda plans: twice(plans, 1, "add")),
    "a pass that runs twice": lambda: in_two_devices(
        lambda plans: twice(plans, 0, "run     PP0:F@0")
    ),
    "an update that is missing": lambda: in_two_devices(lambda plans: without(plans, 0, "update")),
    "an order that is not kept": lambda: against_the_order(),
}


def test_every_rule_draws_the_instructions_it_is_about(golden: Golden) -> None:
    texts = [f"{name}\n{broken()}\n" for name, broken in BROKEN.items()]

    golden("refusals.txt", "\n".join(texts))


@pytest.mark.parametrize("name", BROKEN)
def test_a_refusal_marks_where_it_stopped(name: str) -> None:
    marked = [row for row in BROKEN[name]().splitlines() if row.startswith("  > ")]

    assert marked
