"""Order: when regions run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from synthetic import chain

from piper import rehearse
from piper.directives import Directive, Order, Place, Split, apply
from piper.directives.crossing_orders import warn_crossing
from piper.directives.order import Ahead
from piper.errors import DirectiveError, PassError
from piper.ir.dag import Dag
from piper.ir.filters import Filter, where
from piper.ir.model import Model
from piper.ir.training import training_dag
from piper.job.compile.compiler import compile_strategy


def F(stage: int, microbatch: int) -> Filter:
    return where(PP=stage, MB=microbatch, PASS="F")


def B(stage: int, microbatch: int, half: str = "") -> Filter:
    return where(PP=stage, MB=microbatch, PASS=f"B{half}")


def places(*devices: int) -> list[Directive]:
    return [Place(where(PP=stage), [device]) for stage, device in enumerate(devices)]


def ordered(model: Model, devices: Sequence[int], *orders: Order, microbatches: int = 2) -> Dag:
    """The DAG after places, a split, and these orders."""
    program = [*places(*devices), Split("MB", microbatches), *orders]
    return apply(program, training_dag(model))


def temporal(dag: Dag) -> list[str]:
    return [f"{' '.join(p.before)} -> {' '.join(p.after)}" for p in dag.precedences]


def refusal(model: Model, devices: Sequence[int], *orders: Order, microbatches: int = 2) -> str:
    with pytest.raises(DirectiveError) as refused:
        ordered(model, devices, *orders, microbatches=microbatches)
    return str(refused.value)


def test_each_slot_runs_before_the_next() -> None:
    order = Order([[F(0, 0)], [F(0, 1)], [B(0, 0)], [B(0, 1)]])

    dag = ordered(chain(1), [0], order)

    assert temporal(dag) == [
        "PP0:F@0 -> PP0:F@1",
        "PP0:F@1 -> PP0:B@0",
        "PP0:B@0 -> PP0:B@1",
    ]


def test_regions_in_one_slot_stay_unordered() -> None:
    order = Order([[F(0, 0)], [B(0, 0), F(0, 1)], [B(0, 1)]])

    dag = ordered(chain(1), [0], order)

    assert temporal(dag) == ["PP0:F@0 -> PP0:B@0 PP0:F@1", "PP0:B@0 PP0:F@1 -> PP0:B@1"]


def test_a_slot_orders_only_its_own_devices() -> None:
    order = Order([[F(0, 0)], [F(1, 0)], [F(0, 1)], [F(1, 1)]])

    dag = ordered(chain(2), [0, 1], order)

    assert temporal(dag) == ["PP0:F@0 -> PP0:F@1", "PP1:F@0 -> PP1:F@1"]


CROSSING = {
    "one pass before what it needs": ([F(1, 0), F(0, 0), F(0, 1), F(1, 1)], "PP1:F@0", "PP0:F@0"),
    "device by device": ([F(0, 0), B(0, 0), F(1, 0), B(1, 0)], "PP0:B@0", "PP1:B@0"),
    "far apart": ([F(2, 1), F(0, 0), F(0, 1)], "PP2:F@1", "PP0:F@1"),
}


@pytest.mark.parametrize("name", CROSSING)
def test_a_list_that_contradicts_the_dataflow_between_devices_is_not_silent(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    slots, early, late = CROSSING[name]
    warn_crossing.cache_clear()

    for _ in range(2):  # it is said once
        ordered(chain(3), [0, 1, 2], Order(slots))

    assert caplog.messages == [
        f"order (directive 5 of 5) lists {early} before {late}, which it needs from another "
        f"device. An order of passes holds on each device by itself: {late} runs first"
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_list_in_an_order_of_the_dataflow_is_silent(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance, left = Random(seed), [[F(0, k), F(1, k), B(1, k), B(0, k)] for k in range(3)]
    slots = []
    while any(left):
        slots.append(chance.choice([row for row in left if row]).pop(0))

    ordered(chain(2), [0, 1], Order(slots), microbatches=3)

    assert not caplog.messages


def test_one_device_with_two_regions_has_one_order() -> None:
    order = Order([[F(0, 0)], [F(1, 0)], [F(0, 1)], [F(1, 1)]])

    dag = ordered(chain(2), [0, 0], order)

    assert temporal(dag) == [
        "PP0:F@0 -> PP1:F@0",
        "PP1:F@0 -> PP0:F@1",
        "PP0:F@1 -> PP1:F@1",
    ]


def test_a_slot_may_be_written_without_its_list() -> None:
    assert Order([F(0, 0), F(0, 1)]) == Order([[F(0, 0)], [F(0, 1)]])


def test_an_order_without_slots_changes_nothing() -> None:
    dag = ordered(chain(1), [0], Order([]), Order([[]]), Order([[F(0, 0)]]))

    assert temporal(dag) == []


def test_naming_a_half_splits_that_backward_only() -> None:
    order = Order([[F(0, 0)], [B(0, 0, "I")], [F(0, 1)], [B(0, 1)], [B(0, 0, "W")]])

    dag = ordered(chain(1), [0], order)

    assert [node.id for node in dag.computes] == [
        "PP0:F@0",
        "PP0:F@1",
        "PP0:BI@0",
        "PP0:BW@0",
        "PP0:B@1",
    ]
    assert dag.nodes["PP0:BI@0"].writes == ("carry:PP0@0",)
    assert dag.nodes["PP0:BW@0"].writes == ("g:PP0/PP0@0",)
    assert dag.nodes["PP0:U"].reads == (("g:PP0/PP0@0", "g:PP0/PP0@1"),)


def test_halves_work_without_a_split_of_the_batch() -> None:
    slots = [[where(PP=0, PASS=name)] for name in ("F", "BI", "BW")]

    dag = apply([Place(where(), [0]), Order(slots)], training_dag(chain(1)))

    assert temporal(dag) == ["PP0:F -> PP0:BI", "PP0:BI -> PP0:BW"]


def test_a_later_order_may_name_the_halves_an_earlier_one_made() -> None:
    first = Order([[B(0, 0, "I")], [B(0, 1, "I")]])
    second = Order([[B(0, 0, "W")], [B(0, 1, "W")]])

    together = ordered(chain(1), [0], first, second)
    apart = apply(
        [*places(0), Split("MB", 2), first, Place(where(), [0]), second], training_dag(chain(1))
    )

    assert temporal(together) == temporal(apart)
    assert [*together.nodes] == [*apart.nodes]


def test_many_orders_in_a_row_give_what_each_gives_alone() -> None:
    rows = [Order([[F(s, 0)], [F(s, 1)], [B(s, 0)], [B(s, 1)]]) for s in range(3)]

    batch = ordered(chain(3), [0, 1, 2], *rows)
    dag = ordered(chain(3), [0, 1, 2])
    for row in rows:
        dag = row.rewrite(dag)

    assert temporal(batch) == temporal(dag)
    assert [str(p.maker) for p in batch.precedences[::3]] == [
        "order (directive 5 of 7)",
        "order (directive 6 of 7)",
        "order (directive 7 of 7)",
    ]


def test_a_filter_that_matches_nothing_is_refused() -> None:
    text = refusal(chain(2), [0, 1], Order([[F(0, 0)], [F(0, 5)]]))

    assert text == (
        "order (directive 4 of 4): where(PP=0, MB=5, PASS='F') matches nothing\n"
        "  fix: where(PP=0, PASS='F') has MB 0, 1: use one of these"
    )


def test_the_order_at_fault_is_named_among_many() -> None:
    good = Order([[F(0, 0)], [F(0, 1)]])

    text = refusal(chain(2), [0, 1], good, Order([[F(1, 0)], [F(9, 1)]]), good)

    assert text == (
        "order (directive 5 of 6): where(PP=9, MB=1, PASS='F') matches nothing\n"
        "  fix: where(MB=1, PASS='F') has PP 0, 1: use one of these"
    )


def test_a_misspelt_key_is_refused() -> None:
    text = refusal(chain(2), [0, 1], Order([[where(PP=0, MV=0)]]))

    assert text == (
        "order (directive 4 of 4): no region has the tag MV\n"
        "  fix: use one of PP, MB, PASS; did you mean MB?"
    )


def test_an_order_that_comes_before_the_split_is_refused() -> None:
    program = [*places(0), Order([[F(0, 0)], [F(0, 1)]]), Split("MB", 2)]

    with pytest.raises(DirectiveError) as refused:
        apply(program, training_dag(chain(1)))

    assert str(refused.value) == (
        "order (directive 2 of 3): no region has the tag MB\n"
        '  fix: write Split("MB", n) before this directive'
    )


def test_an_order_that_comes_before_its_place_is_refused() -> None:
    order = Order([[where(PP=0, PASS="F")], [where(PP=1, PASS="F")]])

    with pytest.raises(DirectiveError) as refused:
        apply([Place(where(PP=0), [0]), order, Place(where(PP=1), [1])], training_dag(chain(2)))

    assert str(refused.value) == (
        "order (directive 2 of 3): PP1:F has no device yet\n"
        "  fix: put its `Place` before this `Order`"
    )


def test_a_pass_in_two_slots_is_refused() -> None:
    text = refusal(chain(1), [0], Order([[F(0, 0)], [F(0, 1)], [B(0, 0)], [F(0, 0)]]))

    assert text == (
        "order (directive 3 of 3): PP0:F@0 is in both slots[0] and slots[3]\n"
        "  fix: name each pass of each microbatch in one slot only"
    )


def test_a_pass_named_twice_in_one_slot_is_in_it_once() -> None:
    order = Order([[F(0, 0), where(MB=0, PASS="F")], [F(0, 1)]])

    dag = ordered(chain(1), [0], order)

    assert temporal(dag) == ["PP0:F@0 -> PP0:F@1"]


def test_a_backward_cannot_be_whole_and_in_halves() -> None:
    text = refusal(chain(1), [0], Order([[B(0, 0)], [B(0, 0, "I")], [B(0, 0, "W")]]))

    first = text.splitlines()[0]
    assert first == "order (directive 3 of 3): where(PP=0, MB=0, PASS='B') matches nothing"


def test_an_order_cannot_halve_a_backward_that_another_one_named_whole() -> None:
    whole = Order([[F(0, 0)], [B(0, 0)], [F(0, 1)], [B(0, 1)]])
    halves = Order([[B(0, 0, "I")], [B(0, 0, "W")]])

    with pytest.raises(DirectiveError) as together:
        ordered(chain(1), [0], whole, halves)
    with pytest.raises(DirectiveError) as apart:
        apply(
            [*places(0), Split("MB", 2), whole, Place(where(), [0]), halves],
            training_dag(chain(1)),
        )

    assert together.value.where in ("order (directive 3 of 4)", "order (directive 4 of 4)")
    assert apart.value.where == "order (directive 5 of 5)"


def test_an_order_against_the_dataflow_is_refused_with_the_cycle() -> None:
    text = refusal(chain(1), [0], Order([[B(0, 0)], [F(0, 0)]]), microbatches=1)

    assert text == (
        "order (directive 3 of 3): these wait for each other\n"
        "    PP0:B@0 -> PP0:F@0   order (directive 3 of 3)\n"
        "    PP0:F@0 -> PP0:B@0   data flow\n"
        "  fix: let the order put PP0:B@0 after what it needs, or in the same slot"
    )


def test_a_backward_weight_before_its_backward_input_is_refused() -> None:
    order = Order([[F(0, 0)], [B(0, 0, "W")], [B(0, 0, "I")]])

    text = refusal(chain(1), [0], order, microbatches=1)

    assert text == (
        "order (directive 3 of 3): these wait for each other\n"
        "    PP0:BW@0 -> PP0:BI@0   order (directive 3 of 3)\n"
        "    PP0:BI@0 -> PP0:BW@0   data flow\n"
        "  fix: let the order put PP0:BW@0 after what it needs, or in the same slot"
    )


def test_orders_of_two_ranks_that_contradict_each_other_are_refused() -> None:
    first = Order([[F(0, 0)], [F(0, 1)], [B(0, 1)], [B(0, 0)]])
    second = Order([[F(1, 0)], [B(1, 0)], [F(1, 1)], [B(1, 1)]])
    third = Order([[F(0, 0)], [B(0, 0)], [F(0, 1)], [B(0, 1)]])
    against = Order([[F(1, 1)], [B(1, 1)], [F(1, 0)], [B(1, 0)]])

    fine = ordered(chain(2), [0, 1], first, second)
    text = refusal(chain(2), [0, 1], third, against)

    assert len(fine.precedences) == 6
    assert text.splitlines()[0] == "order (directive 5 of 5): these wait for each other"
    arrows = dict(line.strip().split("   ") for line in text.splitlines()[1:-1])
    assert set(arrows) == {
        "PP0:B@0 -> PP0:F@1",
        "PP0:F@1 -> PP1:F@1",
        "PP1:F@1 -> PP1:B@1",
        "PP1:B@1 -> PP1:F@0",
        "PP1:F@0 -> PP1:B@0",
        "PP1:B@0 -> PP0:B@0",
    }
    assert arrows["PP0:B@0 -> PP0:F@1"] == "order (directive 4 of 5)"
    assert arrows["PP1:B@1 -> PP1:F@0"] == "order (directive 5 of 5)"
    assert arrows["PP0:F@1 -> PP1:F@1"] == arrows["PP1:B@0 -> PP0:B@0"] == "data flow"
    assert text.splitlines()[-1].startswith("  fix: let the order put PP")


def test_an_order_against_buffers_is_refused_and_says_so() -> None:
    model = chain(1)
    stateful = replace(model, regions=(replace(model.regions[0], stateful=True),))

    text = refusal(stateful, [0], Order([[F(0, 1)], [F(0, 0)]]))

    assert "\n    PP0:F@0 -> PP0:F@1   buffers updated in batch order\n" in text
    assert "\n    PP0:F@1 -> PP0:F@0   order (directive 3 of 3)\n" in text


def test_an_order_that_leaves_out_a_microbatch_is_refused() -> None:
    order = Order([[F(0, 0)], [F(0, 1)], [B(0, 0)], [B(0, 1)], [F(0, 2)]])

    with pytest.raises(PassError) as refused:
        compile_strategy(chain(1), [*places(0), Split("MB", 3), order])

    assert str(refused.value) == (
        "strategy: the order (directive 3 of 3) names PP0 B for 2 of its microbatches, but not "
        "PP0:B@2\n"
        "  fix: add slots for PP0:B@2, or leave PP0 B out of the order"
    )


def test_microbatches_of_other_sizes_count_among_those_that_an_order_names() -> None:
    """Each size has regions of its own."""
    x, layer = torch.ones(4, 2), torch.nn.Linear(2, 2)
    place, split = Place(where(), [0]), Split("MB", 3)
    slots = [where(MB=k, PASS=which) for which in "FB" for k in range(3)]

    with pytest.raises(PassError) as refused:
        mse = torch.nn.functional.mse_loss
        rehearse(layer, mse, [place, split, Order(slots[1:])], [(x, x)])

    assert str(refused.value).startswith(
        "strategy: the order (directive 3 of 3) names all F for 2 of its microbatches, but not "
    )


@pytest.mark.parametrize("ahead", [False, True, "pairs"])
def test_weight_gradients_at_the_end_are_named_whatever_is_before_them(ahead: Ahead) -> None:
    """They join the slot before them, which may be the last, or the only one."""
    pairs = [F(0, 0), (F(0, 1), B(0, 0, "I")), (B(0, 0, "W"), B(0, 1, "I")), B(0, 1, "W")]
    alone = [F(0, 0), F(0, 1), B(0, 0, "I"), B(0, 1, "I"), B(0, 0, "W"), B(0, 1, "W")]
    for slots in (pairs, alone, [(F(0, 0), F(0, 1), B(0, 0, "I"), B(0, 1, "I")), *alone[-2:]]):
        program = [*places(0), Split("MB", 2), Order(slots, ahead=ahead)]
        assert compile_strategy(chain(1), program).plans


def test_an_order_of_forwards_alone_is_accepted() -> None:
    order = Order([[F(0, m)] for m in range(3)])

    compiled = compile_strategy(chain(1), [*places(0), Split("MB", 3), order])

    assert len(compiled.plans) == 1


def test_two_orders_may_share_the_microbatches_between_them() -> None:
    orders = [Order([[F(0, 0)], [F(0, 1)]]), Order([[F(0, 1)], [F(0, 2)]])]

    compiled = compile_strategy(chain(1), [*places(0), Split("MB", 3), *orders])

    assert len(compiled.plans) == 1


@pytest.mark.parametrize(
    "wanted",
    [
        where(PP=0, PASS=["F", "SEND"]),
        where(PP=0, PASS="SEND") | where(PP=0, PASS="F"),
        ~where(PASS="UPDATE"),
    ],
    ids=str,
)
def test_messages_are_named_by_filters_of_their_own(wanted: Filter) -> None:
    message = refusal(chain(2), [0, 1], Order([[wanted], [F(1, 1)]]))

    assert "names messages or updates as one of several" in message
    assert "write a filter for each in one slot" in message
