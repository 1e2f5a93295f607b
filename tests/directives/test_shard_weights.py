"""Shard of weights and tokens: what it makes of models that are divided."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
from divided import KINDS, divided_chain
from draws import levels_of, one_of

from piper.directives import Directive, Order, Place, Replicate, Shard, Split, Strategy
from piper.errors import DirectiveError
from piper.ir.filters import where
from piper.ir.model import Model
from piper.ir.nodes import Collective, Redistribute, Totals
from piper.ir.text.parse import parse
from piper.ir.text.text import text
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.instructions import Load, Total
from piper.plan.instructions import Redistribute as Message

PAIRS = [[0, 1], [2, 3]]
SLOTS = [
    [where(MB=0, PASS="F")],
    [where(MB=1, PASS="F"), where(MB=0, PASS="B")],
    [where(MB=1, PASS="B")],
]


def divided(groups: list[list[int]], zero: int | None = 0, **options: Any) -> list[Directive]:
    """Everything on these devices, divided in these groups."""
    devices = [device for group in groups for device in group]
    keep = () if zero is None else (Replicate(where(), devices, zero=zero),)
    shard = Shard(where(), groups, what="weights", **options)
    return [Place(where(), devices), *keep, shard, Split("MB", 2)]


def compiled(program: list[Directive], model: Model | None = None) -> Compiled:
    return compile_strategy(model or divided_chain(), program, clip=True)


def messages(found: Compiled) -> list[Redistribute]:
    return [node for node in found.dag.nodes.values() if isinstance(node, Redistribute)]


def steps(found: Compiled) -> list[tuple[str, str]]:
    """Of the first microbatch: forward or backward, and what is done."""
    return [(node.phase[0], str(node.step)) for node in messages(found) if not node.microbatch]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tp", [("F", "all-reduce"), ("B", "all-reduce")]),
        (
            "sp",
            [("F", "all-gather"), ("F", "reduce-scatter"), ("B", "all-gather"),
             ("B", "reduce-scatter")],
        ),
        ("cp", [("F", "all-to-all"), ("F", "all-to-all"), ("B", "all-to-all"),
                ("B", "all-to-all")]),
        (
            "others",
            [("F", "slice"), ("F", "all-gather"), ("F", "all-reduce"), ("B", "all-reduce"),
             ("B", "slice"), ("B", "all-gather")],
        ),
    ],
)  # fmt: skip
def test_conversions_become_messages_of_their_group(
    kind: str, expected: list[tuple[str, str]]
) -> None:
    found = compiled(divided(PAIRS), divided_chain(steps=KINDS[kind]))

    assert steps(found) == expected
    assert {(node.groups, node.stream) for node in messages(found)} == {(((0, 1), (2, 3)), "tp")}


def test_a_group_gets_one_batch_and_its_devices_know_their_rank() -> None:
    found = compiled(divided(PAIRS))

    loads = {
        plan.device: {(one.value, one.index, one.part, one.parts) for one in plan.instructions
                      if isinstance(one, Load) and one.role in ("rank", "batch")}
        for plan in found.plans
    }  # fmt: skip
    assert loads[0] == {
        ("x@0", 0, 0, 2), ("x@1", 0, 1, 2), ("rank@0", 0, 0, 2), ("rank@1", 0, 1, 2)
    }  # fmt: skip
    assert loads[0] == loads[2] and loads[1] == loads[3]
    assert ("rank@0", 1, 0, 2) in loads[1] and ("x@1", 0, 1, 2) in loads[1]


def test_gradients_are_added_up_by_devices_with_the_same_part() -> None:
    found = compiled(divided(PAIRS))

    groups = {
        node.writes[0].rpartition(".")[2]: node.groups
        for node in found.dag.nodes.values()
        if isinstance(node, Collective)
    }
    assert groups == {
        "cut": ((0, 2), (1, 3)),
        "invariant": ((0, 2), (1, 3)),
        "replicated": ((0, 1, 2, 3),),
    }


def test_one_group_adds_up_parts_of_gradients_without_being_asked() -> None:
    found = compiled(divided([[0, 1]], zero=None))

    nodes = [node for node in found.dag.nodes.values() if isinstance(node, Collective)]
    assert [(str(node.kind), node.groups, node.stream) for node in nodes] == [
        ("all-reduce", ((0, 1),), "tp")
    ] * 3
    assert all("replicated" in node.id for node in nodes)


GROUPS = {"two": [[0, 1]], "pairs": PAIRS, "four": [[0, 1, 2, 3]]}


@one_of(3)
@pytest.mark.parametrize(("of", "zero"), levels_of(product(KINDS, GROUPS), [0, 1, 2, 3]))
def test_loss_and_norm_count_everything_once(of: tuple[str, str], zero: int) -> None:
    kind, groups = of[0], GROUPS[of[1]]
    model = divided_chain(ways=len(groups[0]), steps=KINDS[kind])

    found = compiled(divided(groups, zero), model)

    totals = [
        (plan.device, one) for plan in found.plans for one in plan.instructions
        if isinstance(one, Total)
    ]  # fmt: skip
    assert {device for device, one in totals if one.losses} == {group[0] for group in groups}
    whole = [grad for _, one in totals for grad in one.grads if "invariant" in grad]
    pieces = [grad for _, one in totals for grad in one.grads if "cut" in grad]
    assert len(pieces) == len(whole) * len(groups[0])


GRIDS = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])  # rows and columns


def by_both(zero: int | None, weights: int = 0) -> Compiled:
    """By weights along rows or columns of a grid, and by tokens along the others."""
    keep = () if zero is None else (Replicate(where(), [0, 1, 2, 3], zero=zero),)
    shards = (
        Shard(where(), GRIDS[weights], what="weights"),
        Shard(where(), GRIDS[1 - weights], what="tokens"),
    )
    program = [Place(where(), [0, 1, 2, 3]), *keep, *shards, Split("MB", 2)]
    return compiled(program, divided_chain(both=True))


def test_conversions_go_along_the_axis_of_their_division() -> None:
    found = by_both(zero=None, weights=1)

    groups = {(node.stream, node.groups) for node in messages(found)}
    assert groups == {("cp", ((0, 1), (2, 3))), ("tp", ((0, 2), (1, 3)))}


def test_gradients_are_added_up_along_the_axes_where_they_are_parts() -> None:
    found = by_both(zero=None)

    groups = {
        node.writes[0].rpartition(".")[2]: node.groups
        for node in found.dag.nodes.values()
        if isinstance(node, Collective)
    }
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert groups == {
        "replicated-cut": columns, "replicated-invariant": columns, "invariant-replicated": rows,
        "replicated-replicated": ((0, 1, 2, 3),),
    }  # fmt: skip


@pytest.mark.parametrize("weights", [0, 1])
@pytest.mark.parametrize("zero", [None, 0])
def test_loss_and_norm_count_everything_once_along_both_axes(
    zero: int | None, weights: int
) -> None:
    found = by_both(zero, weights)

    totals = [
        (plan.device, one) for plan in found.plans for one in plan.instructions
        if isinstance(one, Total)
    ]  # fmt: skip
    counted = Counter(
        re.findall(r"[a-z]+-[a-z]+", grad)[0] for _, one in totals for grad in one.grads
    )
    assert {device for device, one in totals if one.losses} == {0}
    assert counted == {
        f"{tokens}-{kind}": 3 * (2 if kind == "cut" else 1)
        for tokens in ("replicated", "invariant")
        for kind in ("cut", "replicated", "invariant")
    }


def test_groups_that_are_not_a_grid_are_refused() -> None:
    rows = Shard(where(), [[0, 1], [2, 3]], what="weights")
    program = [Place(where(), [0, 1, 2, 3]), rows, Shard(where(), [0, 1, 2, 3], what="tokens")]

    with pytest.raises(DirectiveError) as refused:
        compiled(program, divided_chain(both=True))

    assert str(refused.value) == (
        "shard (directive 3 of 3): PP0.0 is divided by tokens over [[0, 1, 2, 3]] and by weights "
        "over [[0, 1], [2, 3]], which are not a grid\n"
        "  fix: let the groups be rows and columns of one grid of devices, such as [[0, 2], "
        "[1, 3]] for tokens and [[0, 1], [2, 3]] for weights"
    )


def test_tokens_are_divided_once() -> None:
    again = [Shard(where(), [[0, 1], [2, 3]], what="tokens")] * 2

    with pytest.raises(DirectiveError, match="PP0.0 is already sharded"):
        compiled([Place(where(), [0, 1, 2, 3]), *again], divided_chain())


@one_of(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0, 3])
def test_stages_send_between_equal_parts(kind: str, zero: int) -> None:
    model = divided_chain(stages=2, steps=KINDS[kind])
    program: list[Directive] = []
    for stage, devices in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        groups = [devices[:2], devices[2:]]
        program += [
            Place(where(PP=stage), devices),
            Replicate(where(PP=stage), devices, zero=zero),
            Shard(where(PP=stage), groups, what="weights"),
        ]

    found = compiled([*program, Split("MB", 2)], model)

    assert len(found.plans) == 8
    assert len(found.dag.replicas.feeds) == 2


@one_of(2)
@pytest.mark.parametrize("kind", KINDS)
def test_orders_split_backwards_and_overlap(kind: str) -> None:
    halves = [
        [where(MB=0, PASS="F")],
        [where(MB=0, PASS="BI"), where(MB=1, PASS="F")],
        [where(MB=1, PASS="BI")],
        [where(MB=0, PASS="BW"), where(MB=1, PASS="BW")],
    ]
    model = divided_chain(steps=KINDS[kind])
    for slots in (SLOTS, halves):
        found = compiled([*divided(PAIRS), Order(slots)], model)

        assert not any(node.region.endswith("convert") for node in found.dag.computes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dag_reads_back_as_it_prints(kind: str) -> None:
    dag = compiled([*divided(PAIRS), Order(SLOTS)], divided_chain(steps=KINDS[kind])).dag

    again = parse(text(dag), dag.model)

    assert text(again) == text(dag)
    assert again.nodes == dag.nodes


def test_messages_of_one_microbatch_hide_behind_the_other() -> None:
    program = [*divided([[0, 1]], zero=None), Order(SLOTS)]
    dag = compiled(program, divided_chain(steps=KINDS["sp"])).dag

    work = [dag.times[node.id] for node in dag.computes]
    hidden = sum(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
        for a in (dag.times[node.id] for node in messages_of(dag))
        for b in work
    )
    assert hidden > 0


def messages_of(dag: Any) -> list[Redistribute]:
    return [node for node in dag.nodes.values() if isinstance(node, Redistribute)]


def test_bytes_are_those_of_rings() -> None:
    sp, tp = (
        compiled(divided([[0, 1]], zero=None), divided_chain(steps=KINDS[kind])).plans[0]
        for kind in ("sp", "tp")
    )

    sent = [
        sum(one.sent for one in plan.instructions if isinstance(one, Message)) for plan in (sp, tp)
    ]
    whole = 8 * 4 * 4  # bytes of an activation
    assert sent == [2 * 4 * whole // 2, 2 * 2 * whole]  # the same: 4 of one half, or 2 of both


def test_it_is_the_same_strategy_in_json() -> None:
    plan = {"layers.*.up": "colwise"}
    strategy = Strategy([Shard(where(PP=0), PAIRS, what="tokens"),
                         Shard(where(PP=1), [0, 1], what="weights", plan=plan)])  # fmt: skip

    again = Strategy.from_json(strategy.to_json())

    assert again == strategy
    assert '"stream": "cp", "what": "tokens"' in strategy.to_json()
    assert '"plan": {"layers.*.up": "colwise"}' in strategy.to_json()


def test_the_totals_are_one_node() -> None:
    found = compiled(divided(PAIRS))

    assert sum(isinstance(node, Totals) for node in found.dag.nodes.values()) == 1
