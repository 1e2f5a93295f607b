"""Filters: what `where` accepts, and what it means."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain

from piper.directives import Split
from piper.errors import Refused
from piper.ir.dag import Dag
from piper.ir.filters import ANY, Filter, accepts, where
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
INDEX = '  fix: write PP=0, PP="*" or PP=None ("-" in JSON)'


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"PASS": "X"}, "PASS='X' is not a pass\n" + PASSES),
        ({"PASS": None}, "PASS=None is not a pass\n" + PASSES),
        ({"PASS": 0}, "PASS=0 is not a pass\n" + PASSES),
        ({"PP": "0"}, "PP='0' is not an index\n" + INDEX),
        ({"PP": True}, "PP=True is not an index\n" + INDEX),
        ({"PP": 0.5}, "PP=0.5 is not an index\n" + INDEX),
        ({"PP": [0, 1]}, "PP=[0, 1] is not an index\n" + INDEX),
    ],
    ids=str,
)
def test_what_can_match_nothing_is_refused_at_once(tags: dict, message: str) -> None:
    with pytest.raises(Refused) as refused:
        where(**tags)

    assert str(refused.value) == message


def fits(wanted: Filter, tags: Mapping[str, int | str]) -> bool:
    return all(accepts(value, tags.get(key)) for key, value in wanted.items)


def meant(dag: Dag, wanted: Filter) -> list[str]:
    """The slow way: ask the filter about every node."""
    return [n.id for n in dag.computes if fits(wanted, {**dict(n.tags), PASS: str(n.phase)})]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "PP": st.sampled_from([0, 1, 2, 7, ANY, None]),
            "MB": st.sampled_from([0, 1, 5, ANY, None]),
            "NO": st.sampled_from([0, ANY, None]),
            "PASS": st.sampled_from(["F", "B", "BI", ANY]),
        },
    ),
    st.booleans(),
)
def test_select_finds_what_the_filter_means_in_the_order_of_the_dag(
    tags: dict, split: bool
) -> None:
    dag = training_dag(chain(3))
    dag = Split("MB", 2).rewrite(dag) if split else dag

    found = [node.id for node in dag.select(where(**tags))]

    assert found == meant(dag, where(**tags))
