"""A strategy as a value, and as JSON."""

from __future__ import annotations

import json
from typing import get_type_hints

import pytest
from draws import drawn, draws
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from synthetic import chain

from piper.directives import Directive, Order, Place, Split, Strategy
from piper.directives.arguments import DeviceGroups, DeviceList, ParameterPlan, Slots
from piper.directives.base import DIRECTIVES
from piper.errors import Refused, StrategyError
from piper.ir.filters import ANY, Filter, where
from piper.job.compile.compiler import compile_strategy

A, C = Place(where(PP=0), [0]), Place(where(PP=1), [1])
MB = Split("MB", 2)


def test_a_strategy_prints_one_directive_per_line() -> None:
    strategy = Strategy([A, MB, Order([[where(PP=0, PASS="F")]])])

    printed = str(strategy)

    assert printed == (
        "Place(filter=where(PP=0), devices=(0,), stream='pp')\n"
        "Split(name='MB', n=2)\n"
        "Order(slots=((where(PP=0, PASS='F'),),))"
    )


def test_strategies_of_equal_directives_are_equal() -> None:
    one, other = Strategy([A, MB]), Strategy([Place(where(PP=0), (0,)), Split("MB", 2)])

    assert one == other
    assert hash(one) == hash(other)
    assert one != Strategy([MB, A])


def test_lists_of_directives_in_a_strategy_are_flattened() -> None:
    strategy = Strategy([A, [C, (MB,)], Strategy([])])

    assert strategy == Strategy([A, C, MB])
    assert len(strategy) == 3
    assert list(strategy) == [A, C, MB]


def test_strategies_and_lists_add_up() -> None:
    assert Strategy([A]) + Strategy([C]) == Strategy([A, C])
    assert Strategy([A]) + [C, [MB]] == Strategy([A, C, MB])


def test_a_strategy_knows_its_microbatches() -> None:
    assert Strategy([A]).microbatches == 1
    assert Strategy([A, Split("MB", 6)]).microbatches == 6


def test_a_strategy_compiles_like_the_list_it_holds() -> None:
    one = compile_strategy(chain(2), Strategy([A, C, MB]))
    other = compile_strategy(chain(2), [A, C, MB])

    assert one.plans == other.plans


indices = st.one_of(st.integers(0, 99), st.just(ANY), st.none())
keys = st.sampled_from(["PP", "EP", "MB", "stage"])


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    tags: dict[str, int | str | None] = draw(st.dictionaries(keys, indices, max_size=3))
    phase = draw(st.sampled_from([None, "F", "B", "BI", "BW", ANY]))
    return where(**tags, **({"PASS": phase} if phase else {}))


devices = st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)
groups = st.sampled_from([[[0, 1], [2, 3]], [[5], [3]], [[0, 2, 4]]])
VALUES: dict[object, st.SearchStrategy[object]] = {
    Filter: filters(),
    Slots: st.lists(st.lists(filters(), max_size=3) | filters(), max_size=4),
    DeviceList: devices,
    DeviceGroups: devices | groups,
    ParameterPlan: st.sampled_from([None, {"layers.*.up": "colwise", "down": "rowwise"}]),
    str: st.sampled_from(["MB", "ep", "é"]),
    int: st.integers(0, 3),
    float: st.integers(1, 99) | st.floats(0.5, 99),
}


def values(kind: object) -> st.SearchStrategy[object]:
    """What a field of this type may hold. The directive rejects what it does not support."""
    return VALUES[kind] if kind in VALUES else st.from_type(kind)


@st.composite
def directives(draw: st.DrawFn) -> Directive:
    entry = DIRECTIVES[draw(st.sampled_from(sorted(DIRECTIVES)))]
    types = get_type_hints(entry.kind)
    arguments = {name: draw(values(types[name])) for name in entry.keys}
    try:
        return entry.kind(**arguments)
    except Refused:
        reject()


@drawn
@settings(max_examples=draws(6, 400))
@given(st.lists(directives(), max_size=4))
def test_a_strategy_comes_back_from_json_as_it_was(program: list[Directive]) -> None:
    strategy = Strategy(program)

    again = Strategy.from_json(strategy.to_json())

    assert again == strategy
    assert again.to_json() == strategy.to_json()


def test_json_has_one_directive_per_line() -> None:
    strategy = Strategy([A, MB, Order([[where(PP=0, EP=None, MB="*", PASS="BI")], [where()]])])

    text = strategy.to_json()

    assert text == (
        "[\n"
        '  {"op": "place", "filter": {"PP": 0}, "devices": [0], "stream": "pp"},\n'
        '  {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},\n'
        '  {"op": "order", "filters": '
        '[[{"PP": 0, "EP": "-", "MB": "*", "PASS": "BI"}], [{}]]}\n'
        "]\n"
    )


PUBLISHED = """[
    {"op": "place", "filter": {"PP": 0}, "devices": [0], "stream": "pp"},
    {"op": "place", "filter": {"PP": 1, "EP": "-"}, "devices": [1], "stream": "pp"},
    {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4},
    {"op": "order", "filters": [
        [{"PP": 0, "MB": 0, "PASS": "F"}],
        [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}]
    ]}
]"""


@pytest.mark.parametrize(
    "text", [PUBLISHED, f'{{"directives": {PUBLISHED}}}'], ids=["list", "object"]
)
def test_the_form_of_the_published_system_loads(text: str) -> None:
    strategy = Strategy.from_json(text)

    assert strategy == Strategy(
        [
            Place(where(PP=0), [0], "pp"),
            Place(where(PP=1, EP=None), [1], "pp"),
            Split("MB", 4),
            Order(
                [
                    [where(PP=0, MB=0, PASS="F")],
                    [where(PP=0, MB=1, PASS="F"), where(PP=0, MB=0, PASS="B")],
                ]
            ),
        ]
    )


OPS = ", ".join(sorted(DIRECTIVES))
NO_LIST = 'strategy: the JSON is not a list\n  fix: write [{"op": "place", ...}, ...]'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, f'directive 1: it has no op\n  fix: write {{"op": one of {OPS}}}'),
        (7, f'directive 1: it has no op\n  fix: write {{"op": one of {OPS}}}'),
        ({"op": "plase"}, f"directive 1: unknown op 'plase'\n  fix: write one of {OPS}"),
        ({"op": None}, f"directive 1: unknown op None\n  fix: write one of {OPS}"),
        ({"op": ["place"]}, f"directive 1: unknown op ['place']\n  fix: write one of {OPS}"),
        (
            {"op": "place", "filter": {}, "device": [0]},
            "place (directive 1): unknown key 'device'\n"
            "  fix: use filter, devices, stream; did you mean devices?",
        ),
        (
            {"op": "split", "dim_name": "MB", "num_microbatches": 2, "xyz": 1},
            "split (directive 1): unknown key 'xyz'\n  fix: use dim_name, "
            "num_microbatches, sizes, replica_sizes, filter",
        ),
        (
            {"op": "place", "filter": {}},
            "place (directive 1): the key 'devices' is missing\n  fix: add \"devices\": ...",
        ),
        (
            {"op": "place", "filter": [0], "devices": [0]},
            'place (directive 1): the filter [0] is not an object\n  fix: write {"PP": 0}',
        ),
        (
            {"op": "place", "filter": {"PP": "0"}, "devices": [0]},
            "place (directive 1): PP='0' is not an index\n"
            '  fix: write PP=0, PP=[0, 1], PP="*" or PP=None ("-" in JSON)',
        ),
        (
            {"op": "place", "filter": {"PP": [0, True]}, "devices": [0]},
            "place (directive 1): PP=True is not an index\n"
            '  fix: write PP=0, PP=[0, 1], PP="*" or PP=None ("-" in JSON)',
        ),
        (
            {"op": "place", "filter": {}, "devices": 0},
            "place (directive 1): devices 0 is not a list of devices\n  fix: write devices=[0]",
        ),
        (
            {"op": "place", "filter": {}, "devices": [True]},
            "place (directive 1): devices [True] is not a list of devices\n"
            "  fix: list devices by their numbers, 0 or more, such as [0, 2]",
        ),
        (
            {"op": "replicate", "filter": {}, "devices": [0, 0]},
            "replicate (directive 1): devices [0, 0] has a device twice\n"
            "  fix: list each device once, such as [0, 2]",
        ),
        (
            {"op": "split", "filter": {"PP": 0}, "dim_name": "MB", "num_microbatches": 2},
            "split (directive 1): filter {'PP': 0} is not supported\n"
            '  fix: write "filter": {}, or leave it out',
        ),
        (
            {"op": "split", "dim_name": "MB", "num_microbatches": 0},
            "split (directive 1): 0 is not a number of microbatches\n"
            "  fix: write a whole number, 1 or more",
        ),
        (
            {"op": "order", "filters": {"PP": 0}},
            "order (directive 1): filters is not a list of slots\n"
            '  fix: write [[{"PP": 0}], [{"PP": 1}]]',
        ),
        (
            {"op": "order", "filters": [{"PP": 0}]},
            "order (directive 1): filters is not a list of slots\n"
            '  fix: write [[{"PP": 0}], [{"PP": 1}]]',
        ),
        (
            {"op": "order", "filters": [[{"PP": 0, "PASS": "FB"}]]},
            "order (directive 1): PASS='FB' is not a pass\n  fix: write one of F, B, BI, BW, "
            "UPDATE, REDUCE, GATHER, SEND, RECV, DISPATCH, COMBINE",
        ),
    ],
    ids=str,
)
def test_json_that_is_no_directive_is_refused(row: object, message: str) -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy.from_json(json.dumps([row]))

    assert str(refused.value) == message


@pytest.mark.parametrize(
    "row",
    [
        {"op": "split", "dim_name": 3, "num_microbatches": 2},
        {"op": "split", "dim_name": "MB", "num_microbatches": True},
        {"op": "split", "dim_name": "MB", "num_microbatches": "2"},
        {"op": "place", "filter": {}, "devices": [0], "stream": 5},
        {"op": "place", "filter": {"PP": 0.5}, "devices": [0]},
        {"op": "order", "filters": [[{"PP": {}}]]},
    ],
    ids=str,
)
def test_values_of_the_wrong_type_are_refused_and_never_crash(row: object) -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy.from_json(json.dumps([row]))

    assert "(directive 1): " in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[{"op": "place",]',
            "strategy, line 1, column 17: this is not JSON: "
            "Expecting property name enclosed in double quotes\n"
            "  fix: write a list of directives",
        ),
        ('{"op": "place"}', NO_LIST),
        ("7", NO_LIST),
        ('{"directives": {}}', NO_LIST),
    ],
    ids=["no json", "object", "number", "no list"],
)
def test_text_that_is_no_strategy_is_refused(text: str, message: str) -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy.from_json(text)

    assert str(refused.value) == message


def test_the_error_has_the_number_of_the_bad_directive() -> None:
    rows = [json.loads(Strategy([d]).to_json())[0] for d in (A, C, MB)]
    rows[1]["devices"] = "0"

    with pytest.raises(StrategyError) as refused:
        Strategy.from_json(json.dumps(rows))

    assert str(refused.value).startswith(
        "place (directive 2): devices '0' is not a list of devices"
    )


def test_json_survives_letters_of_any_language() -> None:
    strategy = Strategy([Place(where(PP=0), [0], "réseau")])

    assert Strategy.from_json(strategy.to_json()) == strategy


def test_strategies_and_directives_add_up_in_any_form() -> None:
    place, split = Place(where(), [0]), Split("MB", 2)

    assert Strategy([place]) + split == Strategy([place, split])
    assert Strategy([place]) + [split] == Strategy([place, split])
    assert [place] + Strategy([split]) == Strategy([place, split])


def test_what_is_no_directive_is_refused() -> None:
    with pytest.raises(StrategyError) as refused:
        Strategy(["x"])

    *names, last = sorted(entry.kind.__name__ for entry in DIRECTIVES.values())
    assert str(refused.value) == (
        f"strategy: 'x' is not a directive\n  fix: write {', '.join(names)} or {last}"
    )


ONE_LIST = 'write one list: Order([where(PP=0, MB=0, PASS="F"), ...])'


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (
            where(),
            "where() is not a list of slots\n  fix: " + ONE_LIST,
        ),
        ([[1]], "[1] is not a slot\n  fix: write a filter or a list of filters: [where(PP=0)]"),
        ([1], "1 is not a slot\n  fix: write a filter or a list of filters: [where(PP=0)]"),
    ],
    ids=["a filter", "a number in a slot", "a number"],
)
def test_an_order_of_something_else_is_refused(slots: object, message: str) -> None:
    with pytest.raises(Refused) as refused:
        Order(slots)

    assert str(refused.value) == message


@pytest.mark.parametrize("ahead", [1, "all", None])
def test_slots_overlap_or_they_do_not(ahead: object) -> None:
    with pytest.raises(Refused) as refused:
        Order([[where()]], ahead=ahead)

    assert (
        str(refused.value)
        == f'ahead={ahead!r} is not supported\n  fix: write True, False or "pairs"'
    )


def test_directives_are_read_by_place() -> None:
    strategy = Strategy([Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", 2)])

    assert strategy[-1] == Split("MB", 2)
    assert strategy[:2] == Strategy(strategy.directives[:2])
