"""Filters: what `where` accepts, and what it means."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain

from piper.directives import Place, Split, Strategy
from piper.errors import Refused
from piper.ir.dag import Dag
from piper.ir.filters import ANY, Both, Either, Filter, Not, where
from piper.ir.training import training_dag
from piper.names import PASS, Phase

TAGS = {"PP": 1, "EP": 0, "PASS": "F"}


def test_a_filter_prints_as_it_is_written() -> None:
    wanted = where(PP=1, EP="*", TP=None, PASS="F")

    printed = str(wanted)

    assert printed == "where(PP=1, EP='*', TP=None, PASS='F')"
    assert eval(printed) == wanted  # noqa: S307


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (where(), True),
        (where(PP=1), True),
        (where(PP=0), False),
        (where(PP="*"), True),
        (where(TP="*"), False),
        (where(PP=None), False),
        (where(TP=None), True),
        (where(PASS="F"), True),
        (where(PASS="B"), False),
        (where(PASS="*"), True),
        (where(PASS=Phase.FORWARD), True),
        (where(PP=1, EP=0, PASS="F"), True),
        (where(PP=1, EP=1, PASS="F"), False),
    ],
    ids=str,
)
def test_a_filter_matches_index_any_and_none(wanted: Filter, matches: bool) -> None:
    assert fits(wanted, TAGS) is matches


PASSES = "  fix: write one of F, B, BI, BW, UPDATE, REDUCE, GATHER, SEND, RECV, DISPATCH, COMBINE"
INDEX = '  fix: write PP=0, PP=[0, 1], PP="*" or PP=None ("-" in JSON)'


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"PASS": "X"}, "PASS='X' is not a pass\n" + PASSES),
        ({"PASS": None}, "PASS=None is not a pass\n" + PASSES),
        ({"PASS": 0}, "PASS=0 is not a pass\n" + PASSES),
        ({"PP": "0"}, "PP='0' is not an index\n" + INDEX),
        ({"PP": True}, "PP=True is not an index\n" + INDEX),
        ({"PP": 0.5}, "PP=0.5 is not an index\n" + INDEX),
        ({"PP": [0, "1"]}, "PP='1' is not an index\n" + INDEX),
        ({"PASS": ["F", "X"]}, "PASS='X' is not a pass\n" + PASSES),
        ({"PP": []}, "PP=[] has no index in it\n  fix: write PP=[0, 1]"),
        ({"PP": range(0)}, "PP=range(0, 0) has no index in it\n  fix: write PP=[0, 1]"),
        (
            {"PP": [0, None]},
            "PP=[0, None] has more than indices in it\n"
            '  fix: write PP="*" alone, or join filters: where(PP=0) | where(PP=None)',
        ),
    ],
    ids=str,
)
def test_what_can_match_nothing_is_refused_at_once(tags: dict, message: str) -> None:
    with pytest.raises(Refused) as refused:
        where(**tags)

    assert str(refused.value) == message


def fits(wanted: Filter, tags: Mapping[str, int | str]) -> bool:
    """What a filter means, written a second time."""
    if isinstance(wanted, Not):
        return not fits(wanted.part, tags)
    if isinstance(wanted, Either | Both):
        found = [fits(part, tags) for part in wanted.parts]
        return (True in found) if isinstance(wanted, Either) else (False not in found)
    for key, value in wanted.items:
        choices = list(value) if isinstance(value, tuple | range) else [value]
        if tags.get(key) not in choices and not (value == "*" and key in tags):
            return False
    return True


def meant(dag: Dag, wanted: Filter) -> list[str]:
    """The slow way: ask the filter about every node."""
    return [n.id for n in dag.computes if fits(wanted, {**dict(n.tags), PASS: str(n.phase)})]


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (where(L=[3, 0, 3]), "where(L=[0, 3])"),
        (where(L=[2, 1, 0]), "where(L=range(0, 3))"),
        (where(L=range(0, 8, 4)), "where(L=[0, 4])"),
        (where(L=range(2)), "where(L=[0, 1])"),
        (where(L=[5]), "where(L=5)"),
        (where(PASS=["F", "B"]), "where(PASS=['B', 'F'])"),
    ],
    ids=str,
)
def test_equal_lists_and_ranges_are_one_filter(given: Filter, same: str) -> None:
    assert str(given) == same
    assert given == eval(same) and hash(given) == hash(eval(same))  # noqa: S307


def test_filters_do_not_join_with_and() -> None:
    with pytest.raises(Refused, match="write & for and"):
        where(PP=0) and where(EP=1)


INDICES = st.lists(st.integers(0, 6), min_size=1, max_size=4)
SPANS = st.builds(range, st.integers(0, 3), st.integers(4, 9), st.integers(1, 3))
PLAIN = st.fixed_dictionaries(
    {},
    optional={
        "PP": st.sampled_from([0, 1, 2, 7, ANY, None]) | INDICES | SPANS,
        "MB": st.sampled_from([0, 1, 5, ANY, None]) | INDICES,
        "NO": st.sampled_from([0, ANY, None]),
        "PASS": st.sampled_from(["F", "B", "BI", ANY]) | st.just(["F", "BW"]),
    },
).map(lambda tags: where(**tags))
FILTERS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=6,
)


@given(FILTERS, st.booleans())
def test_select_finds_what_the_filter_means_in_the_order_of_the_dag(
    wanted: Filter, split: bool
) -> None:
    dag = training_dag(chain(5))
    dag = Split("MB", 2).rewrite(dag) if split else dag

    found = [node.id for node in dag.select(wanted)]

    assert found == meant(dag, wanted)


@given(FILTERS)
def test_every_filter_survives_print_and_json(wanted: Filter) -> None:
    strategy = Strategy([Place(wanted, [0])])

    assert eval(str(wanted)) == wanted  # noqa: S307
    assert Strategy.from_json(strategy.to_json()) == strategy
