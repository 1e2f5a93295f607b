"""Directives, filters and builders that are called wrongly say what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from synthetic import moe_chain

from piper import Offload, Order, Place, Remat, Replicate, Shard, Split, Stage, Stream, where
from piper.directives import apply
from piper.directives.base import DIRECTIVES
from piper.errors import PiperError, Refused
from piper.ir.training import training_dag
from piper.strategies import BUILDERS, one_f_one_b

RIGHT: dict[Any, dict[str, Any]] = {
    Offload: {"filter": where()},
    Order: {"slots": [where(PASS="F"), where(PASS="B")]},
    Place: {"filter": where(), "devices": [0]},
    Remat: {"filter": where()},
    Replicate: {"filter": where(), "devices": [0]},
    Shard: {"filter": where(), "devices": [0]},
    Split: {"name": "MB", "n": 2},
    Stage: {"name": "PP", "stages": 2},
    Stream: {"name": "pp"},
}
HOSTILE: list[Any] = [
    None, object(), "layers.0", "", -1, 0, 1.5, True, [], {}, [None], ["a"], [[0], 1], [0, 0],
    where(PP=0), [where(NO=1)], float("nan"), {"PP": 0}, [0.5], ("a", "b", "c"),
]  # fmt: skip


def message(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as refused:
        call()
    return str(refused.value)


def test_all_directives_are_here() -> None:
    assert {entry.kind for entry in DIRECTIVES.values()} == {*RIGHT}


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_names_that_a_directive_does_not_have(kind: Any) -> None:
    right = RIGHT[kind]
    first = next(iter(right))

    assert message(lambda: kind(**right, wrong=1)).startswith(
        f"{kind.__name__} has no option wrong"
    )
    assert f"write {kind.__name__}({', '.join(right)}" in message(kind)
    assert f"multiple values for argument '{first}'" in message(lambda: kind(right[first], **right))
    assert "too many positional arguments" in message(lambda: kind(*range(20)))


def test_the_messages_say_what_to_write() -> None:
    assert message(lambda: Place(where(PP=0), device=[0])) == (  # type: ignore[call-arg]
        "Place has no option device\n  fix: write devices=..."
    )
    assert message(lambda: Place(where(PP=0))) == (  # type: ignore[call-arg]
        "Place: missing a required argument: 'devices'\n"
        "  fix: write Place(filter, devices, stream='pp'), such as Place(where(PP=0), [0])"
    )
    assert message(lambda: Place("layers.0", [0])) == (  # type: ignore[arg-type]
        "Place: 'layers.0' is not a filter\n  fix: write where(PP=0), or where() for every region"
    )


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_missing_argument_gets_a_call_that_works(kind: Any) -> None:
    example = message(kind).rpartition("such as ")[2]

    assert isinstance(eval(example), kind)


TEXTS: list[Any] = ["0F0,0B0", ["0F0", "0B0"], [["F", "B"]], [where(PP=0), "B"], [("0F0", 1)]]


@pytest.mark.parametrize("slots", TEXTS, ids=str)
def test_orders_of_text_say_what_reads_it(slots: Any) -> None:
    assert "strategies.from_csv" in message(lambda: Order(slots))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("layers.0", "write where(TAG=INDEX), such as where(L=0); `piper show --dag` lists"),
        (0, "write where(TAG=INDEX)"),
        ({"PP": 0}, "write where(TAG=INDEX)"),
        ("F", 'write PASS="F"'),
        (where(PP=0), "write & between two filters"),
    ],
    ids=str,
)
def test_where_takes_tags(given: Any, said: str) -> None:
    assert f"fix: {said}" in message(lambda: where(given))
    assert f"fix: {said}" in message(lambda: where(given, PP=1))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_says_what_it_needs(name: str) -> None:
    with pytest.raises(PiperError, match=r"missing a required argument: 'microbatches'") as refused:
        BUILDERS[name](pp=2)

    assert f"fix: write {BUILDERS[name].__name__}(pp, microbatches, " in str(refused.value)
    with pytest.raises(PiperError, match="too many positional arguments"):
        one_f_one_b(*range(20))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_values_that_make_no_sense_are_not_supported(kind: Any) -> None:
    """Every argument by itself, with every value: made and applied, or an error of Piper."""
    dag = apply([Place(where(), [0])], training_dag(moe_chain(2)))
    alone = training_dag(moe_chain(2))
    options = DIRECTIVES[kind.__name__.lower()].keys

    for option in options:
        for value in HOSTILE:
            try:
                made = kind(**RIGHT[kind] | {option: value})
                if kind is not Remat:  # which needs regions that were captured for it
                    apply([made], alone if kind is Place else dag)
            except PiperError as error:
                assert "fix:" in str(error), (option, value)
