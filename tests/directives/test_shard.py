"""Shard: experts divided over devices."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic import moe_chain

from piper.directives import Directive, Order, Place, Replicate, Shard, Split, Strategy
from piper.errors import StrategyError
from piper.ir.filters import where
from piper.ir.nodes import Collective, Exchange
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.instructions import State

TWO, FOUR, EIGHT = [0, 1], [0, 1, 2, 3], list(range(8))
PAIRS = [[0, 1], [2, 3]]


def on(devices: list[int], groups: list, **options: Any) -> list[Directive]:
    """Everything on these devices, with experts in these groups."""
    keep = Replicate(where(), devices, **options)
    return [Place(where(), devices), keep, Shard(where(EP="*"), groups)]


def compiled(program: list[Directive]) -> Compiled:
    return compile_strategy(moe_chain(1), program)


def exchanges(found: Compiled) -> list[Exchange]:
    return [node for node in found.dag.nodes.values() if isinstance(node, Exchange)]


def collectives(found: Compiled) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of what the experts reduce and gather, by kind."""
    nodes = [node for node in found.dag.nodes.values() if isinstance(node, Collective)]
    return {str(node.kind): node.groups for node in nodes if "EP0" in node.id}


def states(found: Compiled) -> list[State]:
    """What each device has of the experts."""
    return [state for plan in found.plans for state in plan.states if "EP0" in state.bucket]


# What becomes of it


def test_rows_travel_around_every_pass_on_its_stream() -> None:
    program = [*on(TWO, TWO)[:2], Shard(where(EP=0), TWO, stream="tokens"), Split("MB", 2)]

    found = exchanges(compiled(program))

    assert sorted((node.id.replace("BI", "B"), str(node.way)) for node in found) == [
        *((f"from PP0.EP0:B@{part}", "back") for part in range(2)),
        *((f"from PP0.EP0:F@{part}", "back") for part in range(2)),
        *((f"to PP0.EP0:B@{part}", "out") for part in range(2)),
        *((f"to PP0.EP0:F@{part}", "counted") for part in range(2)),
    ]
    assert {(node.stream, node.groups) for node in found} == {("tokens", ((0, 1),))}


@pytest.mark.parametrize("groups", [[[0], [1]], [[1], [0]]])
def test_groups_of_one_device_have_nothing_to_exchange(groups: list) -> None:
    assert compiled(on(TWO, groups)).plans == compiled(on(TWO, groups)[:2]).plans


def test_it_may_stand_anywhere() -> None:
    model = moe_chain(2)
    places = [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])]
    keep = [Replicate(where(PP=0), [0, 2], zero=2), Replicate(where(PP=1), [1, 3])]
    slots = [where(PP=0, MB=m, PASS=p) for p in ("F", "B") for m in (1, 0)]
    program = [*places, *keep, Split("MB", 2), Order(slots)]
    shards = [Shard(where(PP=0, EP="*"), [0, 2]), Shard(where(PP=1, EP="*"), [1, 3])]

    plans = [
        compile_strategy(model, [*program[:at], *shards, *program[at:]]).plans
        for at in range(len(program) + 1)
    ]

    assert all(each == plans[0] for each in plans)


@pytest.mark.parametrize("groups", [[[3, 0], [2, 1]], [[0, 3], [1, 2]], [(1, 2), (3, 0)]])
def test_devices_of_a_group_are_counted_in_rising_order(groups: list) -> None:
    found = compiled(on(FOUR, groups))

    assert [state.share for state in states(found)] == [0, 0, 1, 1]
    assert collectives(found) == {"all-reduce": ((0, 1), (2, 3))}


def test_where_every_device_has_experts_of_its_own_nothing_is_reduced() -> None:
    for zero in range(4):
        found = compiled(on(FOUR, FOUR, zero=zero))

        assert collectives(found) == {}
        assert [(s.share, s.shares, s.ways) for s in states(found)] == [
            (0, 4, 1), (1, 4, 1), (2, 4, 1), (3, 4, 1),
        ]  # fmt: skip


def test_such_experts_need_no_replicate() -> None:
    place, keep, cut = on(TWO, TWO, zero=2)
    only = Replicate(where(EP=None), TWO, zero=2)

    assert compiled([place, only, cut]).plans == compiled([place, keep, cut]).plans


@pytest.mark.parametrize(
    ("zero", "kinds"),
    [
        (0, {"all-reduce"}),
        (1, {"reduce-scatter", "all-gather"}),
        (2, {"reduce-scatter", "all-gather"}),
        (3, {"reduce-scatter", "all-gather"}),
    ],
)
def test_devices_with_the_same_experts_are_replicas(zero: int, kinds: set[str]) -> None:
    found = compiled(on(FOUR, PAIRS, zero=zero))

    assert collectives(found) == dict.fromkeys(kinds, ((0, 2), (1, 3)))
    ways, second = (2, 1) if zero else (1, 0)
    assert [(s.share, s.shares, s.shard, s.ways) for s in states(found)] == [
        (0, 2, 0, ways), (1, 2, 0, ways), (0, 2, second, ways), (1, 2, second, ways),
    ]  # fmt: skip


def test_a_shard_is_cut_from_the_share_of_the_experts() -> None:
    """Two of four experts have 2 * (6 + 1) elements: one message of 14, in two shards."""
    (layout,) = {state.messages for state in states(compiled(on(FOUR, PAIRS, zero=1)))}

    ((dtype, tensors, padded),) = layout

    assert (dtype, tensors) == ("float32", (0, 1))
    assert 14 <= padded < 28 and padded % 2 == 0


@pytest.mark.parametrize("zero", range(4))
def test_the_same_groups_in_both_leave_nothing_to_cut(zero: int) -> None:
    place, _, cut = on(FOUR, PAIRS)
    found = compiled([place, Replicate(where(), PAIRS, zero=zero), cut])

    assert collectives(found) == {"all-reduce": ((0, 2), (1, 3))}
    assert {(state.shard, state.ways) for state in states(found)} == {(0, 1)}


def test_groups_of_replicas_may_hold_several_groups_of_experts() -> None:
    place, _, cut = on(EIGHT, [[0, 1], [2, 3], [4, 5], [6, 7]])
    keep = Replicate(where(), [[0, 1, 2, 3], [4, 5, 6, 7]], zero=2)

    found = compiled([place, keep, cut])

    shards, sums = ((0, 2), (4, 6), (1, 3), (5, 7)), ((0, 4), (2, 6), (1, 5), (3, 7))
    assert collectives(found) == {
        "reduce-scatter": shards, "all-reduce": sums, "all-gather": shards,
    }  # fmt: skip
    assert [(s.share, s.shard) for s in states(found)] == [(0, 0), (1, 0), (0, 1), (1, 1)] * 2


# As text


def test_it_prints_as_it_was_written() -> None:
    assert str(Shard(where(EP=0), PAIRS)) == (
        "Shard(filter=where(EP=0), devices=((0, 1), (2, 3)), stream='ep')"
    )
    assert str(Shard(where(), range(2))) == "Shard(filter=where(), devices=(0, 1), stream='ep')"


def test_json_gives_it_back() -> None:
    strategy = Strategy([Shard(where(PP=0, EP="*"), PAIRS, "x"), Shard(where(EP=0), [2, 0])])

    text = strategy.to_json()

    assert Strategy.from_json(text) == strategy
    assert text == (
        "[\n"
        '  {"op": "shard", "filter": {"PP": 0, "EP": "*"}, "devices": [[0, 1], [2, 3]], '
        '"stream": "x"},\n'
        '  {"op": "shard", "filter": {"EP": 0}, "devices": [2, 0], "stream": "ep"}\n'
        "]\n"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "the key 'devices' is missing\n  fix: add \"devices\": ..."),
        (
            ', "devices": 0',
            "devices 0 is not a list of devices\n  fix: write devices=[0]",
        ),
        (
            ', "devices": [0], "zero": 1',
            "unknown key 'zero'\n  fix: use filter, devices, stream, what, plan, attention",
        ),
    ],
)
def test_json_that_is_no_shard_is_refused(row: str, message: str) -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy.from_json(f'[{{"op": "shard", "filter": {{}}{row}}}]')

    assert str(refused.value) == f"shard (directive 1): {message}"
