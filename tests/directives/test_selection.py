"""What a directive says when its filter matches nothing, and what exists near it."""

from __future__ import annotations

import pytest
from synthetic import chain, moe_chain

from piper import Order, Place, Replicate, Split, Strategy, where
from piper.directives import apply
from piper.directives.selection import selected
from piper.errors import DirectiveError, Refused, StrategyError
from piper.ir.filters import Filter
from piper.ir.training import training_dag


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            where(PP=0, EP=7),
            "where(PP=0, EP=7) matches nothing\n  fix: where(PP=0) has EP 0, 1: use one of these",
        ),
        (
            where(PP=1, EP=[0, 1]),
            "where(PP=1, EP=[0, 1]) matches nothing\n"
            "  fix: where(EP=[0, 1]) has PP 0: use one of these",
        ),
        (
            where(PP=1) & where(EP=0),
            "where(PP=1) & where(EP=0) matches nothing\n"
            "  fix: where(PP=1) matches 5 regions, where(EP=0) matches 1 region, "
            "but none is in all: change one of them",
        ),
        (
            where(PP=range(4, 9)) & ~where(EP="*"),
            "where(PP=range(4, 9)) matches nothing\n  fix: choose from what exists: PP: 0, 1",
        ),
        (
            ~where(PP="*"),
            "~where(PP='*') matches nothing\n"
            "  fix: where(PP='*') matches everything: write one that leaves something",
        ),
        (
            where(PP=[0, 1, 5]),
            "where(PP=[0, 1, 5]): there is no PP=5\n  fix: choose from what exists: PP: 0, 1",
        ),
        (
            where(PP=0) | where(QQ=1),
            "no region has the tag QQ\n  fix: use one of PP, EP, RUN, PASS (the key of a `Split` "
            "or a `Stage` exists only after that directive)",
        ),
    ],
    ids=str,
)
def test_a_filter_that_matches_nothing_shows_what_is_near(wanted: Filter, message: str) -> None:
    dag = training_dag(moe_chain(2, layers=2))

    with pytest.raises(Refused) as refused:
        selected(dag, wanted)

    assert str(refused.value) == message


def test_a_strategy_for_experts_fits_a_model_without_them() -> None:
    dag = training_dag(chain(3))

    found = selected(dag, where(PP=range(3)) & ~where(EP="*"))

    assert found == list(dag.computes)


def test_every_directive_takes_lists_and_combinations() -> None:
    program = [
        Place(where(PP=[0, 1]), [0, 1]),
        Place(~where(PP=range(2)), [2, 3]),
        Replicate(where(PP=range(2)), [0, 1], zero=1),
        Replicate(where(PP=2) | where(PP=3), [2, 3]),
        Split("MB", 2),
        Order([[where(PP=[0, 1], MB=0, PASS="F")], [where(PP=[0, 1], MB=1) & where(PASS="F")]]),
    ]

    dag = apply(program, training_dag(chain(4)))

    assert [node.devices for node in dag.select(where(PASS="F", MB=0))] == [
        (0, 1), (0, 1), (2, 3), (2, 3)
    ]  # fmt: skip
    assert len(dag.replicated) == 4
    assert dag.precedences
    assert Strategy.from_json(Strategy(program).to_json()) == Strategy(program)


@pytest.mark.parametrize(
    "slot",
    [
        where(PP=0, PASS=["BI", "BW"]),
        where(PP=0, PASS=["B", "BI"]),
        where(PP=0, PASS="BI") | where(PP=0, PASS="BW"),
        where(PP=0) & where(PASS="BI"),
    ],
    ids=str,
)
def test_an_order_names_halves_of_a_backward_one_by_one(slot: Filter) -> None:
    with pytest.raises(DirectiveError, match="as a filter of its own"):
        apply([Place(where(), [0]), Order([[slot]])], training_dag(chain(2)))


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ('{"|": {"PP": 0}}', "'|' is not followed by two or more filters"),
        ('{"&": [{"PP": 0}]}', "'&' is not followed by two or more filters"),
        ('{"~": {"PP": 0}, "EP": 1}', "'~' stands beside other keys in the filter"),
        ('{"~": 5}', "the ~ 5 is not an object"),
    ],
)
def test_json_that_combines_nothing_is_refused(filter: str, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        Strategy.from_json(f'[{{"op": "place", "filter": {filter}, "devices": [0]}}]')

    assert error.value.problems[0].what == message
