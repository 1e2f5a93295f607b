"""Orders that name messages and updates: temporal edges, waits in the plans, and a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from synthetic import chain, moe_chain

from piper.costs import Costs
from piper.directives import Directive, Order, Place, Replicate, Shard, Split, Strategy, apply
from piper.errors import PiperError, PlanError
from piper.ir.filters import Filter, where
from piper.ir.nodes import Transfer
from piper.ir.text.parse import parse
from piper.ir.text.text import text
from piper.ir.training import training_dag
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.passes.pass_pipeline import steps
from piper.plan.check.check import check
from piper.plan.instructions import Free, Instruction, Load, Plan

HOME = (0, 1)  # two replicas


def does(what: str, stage: int | None = None, **tags: int | str) -> Filter:
    return where(**({} if stage is None else {"PP": stage}), **tags, PASS=what)


def on_one_lane(zero: int, *orders: Order, stages: int = 2, microbatches: int = 2,
                clip: bool = False, **options: int) -> Compiled:  # fmt: skip
    """All stages on the same two devices."""
    program = [
        Place(where(), HOME),
        Replicate(where(), HOME, zero=zero, gather_stream="gather", **options),
        Split("MB", microbatches),
        *orders,
    ]
    return compile_strategy(chain(stages), program, clip=clip)


def in_a_pipeline(*orders: Order, zero: int = 0, microbatches: int = 2) -> Compiled:
    """Stage 0 on devices 0 and 1, stage 1 on 2 and 3."""
    homes = ((0, 1), (2, 3))
    program: list[Directive] = [Place(where(PP=s), home) for s, home in enumerate(homes)]
    program += [Replicate(where(PP=s), home, zero=zero) for s, home in enumerate(homes)]
    return compile_strategy(chain(2), [*program, Split("MB", microbatches), *orders])


def with_experts(*orders: Order) -> Compiled:
    program = [
        Place(where(), HOME),
        Replicate(where(), HOME),
        Shard(where(EP="*"), HOME),
        Split("MB", 2),
        *orders,
    ]
    return compile_strategy(moe_chain(1), program)


def refusal(compiled: object, *arguments: object, **options: object) -> str:
    with pytest.raises(PiperError) as refused:
        compiled(*arguments, **options)  # type: ignore[operator]
    return str(refused.value)


def at(plan: Plan, kind: str, part: str) -> int:
    """The only instruction of a kind that names this."""
    found = [
        k
        for k, one in enumerate(plan.instructions)
        if type(one).__name__.lower() == kind and part in one.node
    ]
    assert len(found) == 1, (kind, part, found)
    return found[0]


def test_a_reduction_waits_for_the_backward_of_another_stage() -> None:
    order = Order([[does("B", 0, MB=1)], [does("REDUCE", 1)]])

    plan = on_one_lane(0, order).plans[0]

    backward, reduction = at(plan, "run", "PP0:B@1"), at(plan, "reduce", "R:PP1")
    assert backward in plan.instructions[reduction].waits
    free = on_one_lane(0).plans[0]
    assert at(free, "reduce", "R:PP1") < at(free, "run", "PP0:B@1")


def test_a_pass_waits_for_a_reduction() -> None:
    """Without it, the reduction runs beside the pass."""
    order = Order([[does("REDUCE", 1, MB=0)], [does("B", 0, MB=0)]])

    plan = on_one_lane(2, order).plans[0]

    reduction, backward = at(plan, "reduce", "S:PP1/PP1@0"), at(plan, "run", "PP0:B@0")
    assert reduction in plan.instructions[backward].waits


def test_reductions_run_in_the_order_of_their_slots() -> None:
    order = Order([does("B", 0, MB=1), does("REDUCE", 0), does("REDUCE", 1)])

    plan = on_one_lane(0, order).plans[0]

    first, second = at(plan, "reduce", "R:PP0"), at(plan, "reduce", "R:PP1")
    assert first in plan.instructions[second].waits


def test_updates_run_in_the_order_of_their_slots() -> None:
    for stages in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        order = Order([does("UPDATE", stage) for stage in stages])

        plan = on_one_lane(1, order, stages=3).plans[0]

        assert sorted(stages, key=lambda s: at(plan, "update", f"PP{s}:U")) == list(stages)


def test_a_gather_can_wait_for_a_pass() -> None:
    for zero in (1, 2):
        order = Order([does("F", 0, MB=1), does("GATHER", 1)])

        plan = on_one_lane(zero, order).plans[0]

        forward, gather = at(plan, "run", "PP0:F@1"), at(plan, "gather", "W:PP1")
        assert forward in plan.instructions[gather].waits


def test_a_gather_of_sharded_parameters_ends_before_the_slot_that_follows() -> None:
    order = Order([does("F", 0, MB=0), does("GATHER", 2, MB=0, OF="F"), does("F", 1, MB=0)])

    plan = on_one_lane(3, order, stages=3, gather_buffers=3).plans[0]

    first, second = at(plan, "run", "PP0:F@0"), at(plan, "run", "PP1:F@0")
    gather = next(
        k
        for k, one in enumerate(plan.instructions)
        if type(one).__name__ == "Gather" and "W:PP2" in one.node
    )
    assert first < gather < second
    assert first in plan.instructions[gather].waits
    assert gather in plan.instructions[second].waits


def test_a_gather_that_is_ordered_early_keeps_its_buffer() -> None:
    """With two buffers, one is left for the stages between."""
    order = Order([does("GATHER", 3, MB=0, OF="F"), does("F", 0, MB=0)])

    plan = on_one_lane(3, order, stages=4, microbatches=1, gather_buffers=2).plans[0]

    gathers = [one for one in plan.instructions if type(one).__name__ == "Gather"]
    assert len(plan.buffers) == 2
    assert [one.node.partition(" ")[2][:5] for one in gathers][:4] == [
        "W:PP3", "W:PP0", "W:PP1", "W:PP2",
    ]  # fmt: skip


def test_gathers_that_do_not_fit_the_buffers_are_refused() -> None:
    early = [does("GATHER", 2, MB=0, OF="F"), does("GATHER", 3, MB=0, OF="F")]
    order = Order([early, [does("F", 0, MB=0)]])

    message = refusal(on_one_lane, 3, order, stages=4, microbatches=1, gather_buffers=2)

    assert message == (
        "gathers: an order wants PP2, PP3 gathered early, so no gather buffer is left for PP0:F@0\n"
        "  fix: write gather_buffers=3 in their `Replicate`, or let the order gather them later"
    )
    on_one_lane(3, order, stages=4, microbatches=1, gather_buffers=3)


def test_parameters_that_are_still_in_a_buffer_are_not_gathered() -> None:
    order = Order([does("F", 0, MB=0), does("GATHER", 0, MB=1, OF="F")])

    message = refusal(on_one_lane, 3, order, stages=1)

    assert message == (
        "order (directive 4 of 4): where(PP=0, MB=1, OF='F', PASS='GATHER') matches nothing\n"
        "  fix: where(PP=0, OF='F', PASS='GATHER') has MB 0: use one of these"
    )


def test_a_send_waits_and_a_receive_is_posted_in_its_slot() -> None:
    order = Order([does("F", 0, MB=1), does("SEND", 0, MB=0, OF="F")])
    late = Order([does("F", 1, MB=0), does("RECV", 1, MB=1)])

    plans = in_a_pipeline(order, late).plans

    forward, send = at(plans[0], "run", "PP0:F@1"), at(plans[0], "send", "h0@0")
    assert forward in plans[0].instructions[send].waits
    forward, receive = at(plans[2], "run", "PP1:F@0"), at(plans[2], "recv", "h0@1")
    assert forward in plans[2].instructions[receive].waits


def test_a_pass_waits_until_a_receive_has_arrived() -> None:
    order = Order([does("RECV", 1, MB=1, OF="F"), does("F", 1, MB=0)])

    plan = in_a_pipeline(order).plans[2]

    receive, forward = at(plan, "recv", "h0@1"), at(plan, "run", "PP1:F@0")
    assert receive in plan.instructions[forward].waits


def test_dispatch_of_a_microbatch_before_combine_of_another() -> None:
    order = Order([does("DISPATCH", 0, MB=1, OF="F"), does("COMBINE", 0, MB=0, OF="F")])

    plan = with_experts(order).plans[0]

    dispatch, combine = (
        at(plan, "exchange", "to PP0.EP0:F@1"),
        at(plan, "exchange", "from PP0.EP0:F@0"),
    )
    assert dispatch in plan.instructions[combine].waits
    free = with_experts().plans[0]
    assert at(free, "exchange", "from PP0.EP0:F@0") < at(free, "exchange", "to PP0.EP0:F@1")


def test_an_order_with_messages_may_name_a_backward_that_experts_split() -> None:
    order = Order([where(EP=0, MB=0, PASS="B"), does("DISPATCH", 0, MB=1, OF="B")])

    plan = with_experts(order).plans[0]

    dispatch = plan.instructions[at(plan, "exchange", "to PP0.EP0:BI@1")]
    assert at(plan, "run", "PP0.EP0:BW@0") in dispatch.waits


def test_what_overlaps_goes_in_one_slot() -> None:
    """The reduction is over before the next slot, and runs beside the backward of its own."""
    last = [does("REDUCE", 2), does("B", 1, MB=0)]
    order = Order([[does("B", 2, MB=0)], last, [does("B", 0, MB=0)]])

    plan = on_one_lane(0, order, stages=3, microbatches=1).plans[0]

    reduction, beside = at(plan, "reduce", "R:PP2"), at(plan, "run", "PP1:B@0")
    assert reduction < beside and reduction not in plan.instructions[beside].waits
    assert reduction in plan.instructions[at(plan, "run", "PP0:B@0")].waits


def controls(found: Compiled) -> list[Transfer]:
    nodes = found.dag.nodes.values()
    return [n for n in nodes if isinstance(n, Transfer) and n.stream == "control"]


def test_slots_on_other_devices_are_ordered_by_the_dataflow_or_by_a_message() -> None:
    implied = in_a_pipeline(Order([does("B", 1, MB=1), does("REDUCE", 0)]))
    apart = in_a_pipeline(Order([does("B", 0, MB=1), does("REDUCE", 1)]))

    assert not controls(implied)
    (message,) = controls(apart)
    assert (message.source, message.devices) == ((0, 1), (2, 3))
    for sender, receiver in ((0, 2), (1, 3)):
        here, there = apart.plans[sender], apart.plans[receiver]
        backward, sent = at(here, "run", "PP0:B@1"), at(here, "send", "control")
        arrived, reduction = at(there, "recv", "control"), at(there, "reduce", "R:PP1")
        assert backward in here.instructions[sent].waits
        assert arrived in there.instructions[reduction].waits


def test_a_pass_of_the_next_step_waits_for_a_message_unless_it_needs_the_device_anyway() -> None:
    first = in_a_pipeline(Order([does("UPDATE", 0), does("F", 1, MB=0, STEP=1)]))
    last = in_a_pipeline(Order([does("UPDATE", 1), does("F", 0, MB=0, STEP=1)]))
    same = in_a_pipeline(Order([does("UPDATE", 0), does("F", 0, MB=0, STEP=1)]))

    assert not controls(first) and not controls(same)
    (message,) = controls(last)
    assert (message.source, message.devices) == ((2, 3), (0, 1))
    here, there = last.plans[2], last.plans[0]
    assert at(here, "update", "PP1:U") in here.instructions[at(here, "send", "control")].waits
    arrived = at(there, "recv", "control")
    assert any(arrived in one.waits for one in there.instructions if isinstance(one, Free))


def test_a_contradiction_is_drawn() -> None:
    message = refusal(on_one_lane, 0, Order([does("REDUCE", 1), does("B", 1, MB=0)]))

    assert message.startswith("message orders: these wait for each other")
    assert "all-reduce R:PP1 -> PP1:B@0            order (directive 4 of 4)" in message


def test_what_is_meant_by_an_update_before_a_pass() -> None:
    message = refusal(on_one_lane, 0, Order([does("UPDATE", 0), does("F", 1, MB=0)]))

    assert "fix: if you mean passes of the next step, write STEP=1 in their filters" in message


@pytest.mark.parametrize(
    ("slots", "what"),
    [
        ([does("F", 1, STEP=1), does("UPDATE", 0)], "where(PP=1, STEP=1, PASS='F') is not of this"),
        ([does("UPDATE", 0), [does("F", 1, STEP=1), does("F", 0)]], "is not of this step"),
        ([does("F", 1, STEP=1)], "waits for nothing"),
        ([does("UPDATE", 0), does("F", 1, STEP=2)], "is not a pass of the next step"),
        ([does("UPDATE", 0), does("REDUCE", 1, STEP=1)], "only passes can be of the next step"),
    ],
)
def test_what_cannot_be_ordered_before_the_next_step(slots: list[Any], what: str) -> None:
    assert what in refusal(on_one_lane, 0, Order(slots))


@pytest.mark.parametrize(
    ("wanted", "fix"),
    [
        (does("REDUCE", 0, MB=1), "where(PP=0, PASS='REDUCE') has no MB: leave it out"),
        (does("UPDATE", 1, MB=1), "where(PP=1, PASS='UPDATE') has no MB: leave it out"),
        (does("GATHER", 0), "parameters are gathered if `Replicate` shards them with zero=1, 2 or "
         "3; where(PP=0) has F, B, UPDATE, REDUCE"),
        (does("SEND", 0), "a value is sent if a region on other devices reads it; where(PP=0) has "
         "F, B, UPDATE, REDUCE"),
        (does("COMBINE"), "tokens are combined behind regions of experts that `Shard` divides; "
         "where() has F, B, UPDATE, REDUCE"),
        (does("REDUCE", 7), "choose from what exists: PP: 0, 1"),
    ],
    ids=str,
)  # fmt: skip
def test_a_filter_that_matches_nothing_says_what_there_is(wanted: Filter, fix: str) -> None:
    message = refusal(on_one_lane, 0, Order([[wanted], [does("UPDATE", 0)]]))

    assert message.partition("fix: ")[2] == fix


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (Order([does("REDUCE", 0), does("REDUCE")]), "is in both slots[0] and slots[1]"),
        (Order([does("REDUCE", 0), does("UPDATE", 0)], ahead=True), "ahead=True is not supported"),
        (Order([does("F", 0, MB=0, OF="F"), does("UPDATE", 0)]), "OF is for messages"),
    ],
    ids=["twice", "ahead", "of"],
)
def test_orders_that_mean_nothing_are_refused(order: Order, problem: str) -> None:
    assert problem in refusal(on_one_lane, 0, order)


def test_filters_of_messages_combine() -> None:
    alone = Order([[does("B", 0, MB=1)], [does("REDUCE", 1), does("REDUCE", 2)]])
    listed = Order([does("B", 0, MB=1), where(PP=[1, 2], PASS="REDUCE")])
    either = Order([does("B", 0, MB=1), does("REDUCE", 1) | does("REDUCE", 2)])
    others = Order([does("B", 0, MB=1), does("REDUCE") & ~where(PP=0)])
    asked = [
        on_one_lane(0, one, stages=3).dag.precedences for one in (alone, listed, either, others)
    ]

    assert asked[0] == asked[1] == asked[2] == asked[3]
    for unclear in (
        ~does("REDUCE", 0),
        does("REDUCE", 0) | where(PP=1),
        does("F", 0) | does("SEND"),
    ):
        order = Order([does("B", 0, MB=1), unclear])
        assert "names messages or updates as one of several" in refusal(on_one_lane, 0, order)


def test_an_order_with_messages_survives_text_and_json() -> None:
    others = where(PP=[1], PASS="REDUCE") & ~where(PP=range(2, 6))
    order = Order([[does("B", 0, MB=1)], [others, does("UPDATE", 0)]])
    program = Strategy([Place(where(), HOME), Replicate(where(), HOME), Split("MB", 2), order])
    model = chain(2)

    before = apply(program.directives, training_dag(model))
    after = on_one_lane(0, order).dag

    assert Strategy.from_json(program.to_json()) == program
    assert parse(text(before), model).message_orders == before.message_orders
    assert parse(text(after), model).precedences == after.precedences


def test_orders_between_devices_survive_text() -> None:
    """Also while they wait for gathers that do not exist yet."""
    gather = Order([does("B", 0, MB=0), does("GATHER", 1, MB=1, OF="B")])
    later = Order([does("UPDATE", 1), does("F", 0, MB=0, STEP=1)])
    homes = ((0, 1), (2, 3))
    program = [Place(where(PP=s), home) for s, home in enumerate(homes)]
    program += [Replicate(where(PP=s), home, zero=3) for s, home in enumerate(homes)]
    dag = apply([*program, Split("MB", 2), gather, later], training_dag(chain(2)))
    stages = [dag]
    for name, step, _ in steps(Costs()):
        stages.append(step(stages[-1]))
        if name == "message orders":
            break

    for one in (dag, stages[-1]):
        found = parse(text(one), one.model)
        assert found.message_orders == one.message_orders
        assert found.nodes == one.nodes and found.values == one.values
    assert [slot.arrivals for slot in stages[-1].message_orders[0].slots] == [
        (), ("send control:0>2,3",),
    ]  # fmt: skip


ORDERS: dict[str, tuple[object, ...]] = {
    "reduce after pass": (on_one_lane, 2, Order([does("F", 0, MB=1), does("REDUCE", 1, MB=0)])),
    "pass after reduce": (on_one_lane, 2, Order([does("REDUCE", 1, MB=0), does("B", 0, MB=0)])),
    "reduce after reduce": (on_one_lane, 0, Order([does("REDUCE", 1), does("REDUCE", 0)])),
    "reduce after update": (on_one_lane, 0, Order([does("UPDATE", 1), does("REDUCE", 0)])),
    "gather after pass": (on_one_lane, 1, Order([does("F", 0, MB=1), does("GATHER", 1)])),
    "pass after gather": (
        on_one_lane, 3, Order([does("GATHER", 1, MB=0, OF="F"), does("F", 0, MB=0)]),
    ),
    "send after pass": (
        in_a_pipeline,
        Order([does("F", 0, MB=1), does("SEND", 0, MB=0, OF="F"), does("SEND", 0, MB=1, OF="F")]),
    ),
    "reduce after pass elsewhere": (in_a_pipeline, Order([does("B", 0, MB=1), does("REDUCE", 1)])),
    "pass after update elsewhere": (
        in_a_pipeline, Order([does("UPDATE", 1), does("B", 0, MB=1)]),
    ),
    "pass after receive": (
        in_a_pipeline,
        Order([does("RECV", 1, MB=1), does("F", 1, MB=0), does("F", 1, MB=1)]),
    ),
    "receive after pass": (in_a_pipeline, Order([does("F", 1, MB=0), does("RECV", 1, MB=1)])),
    "combine after dispatch": (
        with_experts, Order([does("DISPATCH", MB=1, OF="F"), does("COMBINE", MB=0, OF="F")]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_the_check_notices_a_wait_that_is_dropped(name: str) -> None:
    make, *arguments = ORDERS[name]
    compiled = make(*arguments)  # type: ignore[operator]

    found = [judged(compiled, plans) for plans in without_order_waits(compiled)]

    assert found
    assert all("against order (directive" in message for message in found)


def without_order_waits(compiled: Compiled) -> Iterator[list[Plan]]:
    """The plans, each time without the waits of one instruction that only an order asks for."""
    into = {name: p.before for p in compiled.dag.precedences if p.partial for name in p.after}
    for number, plan in enumerate(compiled.plans):
        for k, one in enumerate(plan.instructions):
            before = into.get(one.node, ())  # type: ignore[call-overload]
            others = [(w, plan.instructions[w]) for w in one.waits]
            kept = [w for w, other in others
                    if other.node not in before and not isinstance(other, Load)]  # fmt: skip
            if len(kept) < len(one.waits):
                yield [
                    *compiled.plans[:number],
                    changed(plan, k, kept),
                    *compiled.plans[number + 1 :],
                ]


def changed(plan: Plan, position: int, waits: Sequence[int]) -> Plan:
    ones: list[Instruction] = list(plan.instructions)
    ones[position] = replace(ones[position], waits=tuple(waits))
    return replace(plan, instructions=tuple(ones))


def judged(compiled: Compiled, plans: Sequence[Plan]) -> str:
    try:
        check(compiled.dag, plans)
    except PlanError as error:
        return str(error)
    return "accepted"
