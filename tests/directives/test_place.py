"""Place: where regions run."""

import pytest
from synthetic import chain

from piper.directives import Place, Split, apply
from piper.errors import DirectiveError, Refused
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.nodes import Compute
from piper.ir.training import training_dag


def homes(dag: Dag) -> dict[str, object]:
    return {node.id: node.devices for node in dag.nodes.values() if isinstance(node, Compute)}


def test_matching_regions_get_devices_and_a_stream_in_all_passes() -> None:
    dag = training_dag(chain(2))

    after = apply([Place(where(PP=0), [0, 2], stream="a"), Place(where(PP=1), [1, 3])], dag)

    assert homes(after) == {"PP0:F": (0, 2), "PP0:B": (0, 2), "PP1:F": (1, 3), "PP1:B": (1, 3)}
    assert [node.stream for node in after.computes] == ["a", "pp", "pp", "a"]


def test_an_empty_filter_places_everything() -> None:
    dag = training_dag(chain(3))

    after = apply([Place(where(), [4])], dag)

    assert set(homes(after).values()) == {(4,)}


def test_a_placed_region_keeps_its_place_in_every_microbatch() -> None:
    dag = training_dag(chain(1))

    after = apply([Place(where(PP=0), [1]), Split("MB", 2)], dag)

    assert set(homes(after).values()) == {(1,)}
    assert len(homes(after)) == 4


def test_the_dag_before_stays_as_it_was() -> None:
    dag = training_dag(chain(1))

    apply([Place(where(PP=0), [1])], dag)

    assert homes(dag) == {"PP0:F": None, "PP0:B": None}


def test_a_list_and_a_tuple_of_devices_are_the_same_directive() -> None:
    one, other = Place(where(PP=0), [0, 2]), Place(where(PP=0), (0, 2))

    assert one == other
    assert str(one) == "Place(filter=where(PP=0), devices=(0, 2), stream='pp')"


def test_two_places_may_agree() -> None:
    dag = training_dag(chain(1))

    after = apply([Place(where(PP=0), [1]), Place(where(), [1])], dag)

    assert set(homes(after).values()) == {(1,)}


@pytest.mark.parametrize(
    "devices",
    [[], [-1], [1, -2], ["0"], [[0, 1]], [0.5], [True], 0, None, "01"],
    ids=str,
)
def test_what_is_no_list_of_devices_is_refused(devices: object) -> None:
    with pytest.raises(Refused) as refused:
        Place(where(PP=0), devices)  # type: ignore[arg-type]

    numbers = isinstance(devices, list) and devices
    each = "list devices by their numbers, 0 or more" if numbers else "list each device once"
    fix = "write devices=[0]" if devices == 0 else f"{each}, such as [0, 2]"
    assert str(refused.value) == f"devices {devices!r} is not a list of devices\n  fix: {fix}"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            [Place(where(PP=0), [0]), Place(where(PP=7), [1])],
            "place (directive 2 of 2): where(PP=7) matches nothing\n"
            "  fix: choose from what exists: PP: 0 to 2",
        ),
        (
            [Place(where(PP=0, PASS="BI"), [0])],
            "place (directive 1 of 1): where(PP=0, PASS='BI') matches nothing\n"
            "  fix: where(PP=0) has the passes F, B: use one of these; BI and BW exist where an "
            '`Order` has where(..., PASS="BI") as a filter of its own',
        ),
        (
            [Place(where(P=0), [0])],
            "place (directive 1 of 1): no region has the tag P\n"
            "  fix: use one of PP, PASS; did you mean PP?"
            " (the key of a `Split` or a `Stage` exists only after that directive)",
        ),
        (
            [Place(where(EP=0), [0])],
            "place (directive 1 of 1): no region has the tag EP\n"
            "  fix: leave out ep= or this directive if the model has no experts; or put the "
            'experts into `with piper.annotate("EP"):`, as '
            "piper.models.hugging_face.adapt_experts(model) does",
        ),
        (
            [Split("MB", 2), Place(where(Mb=0), [0])],
            "place (directive 2 of 2): no region has the tag Mb\n"
            "  fix: use one of PP, MB, PASS; did you mean MB?",
        ),
        (
            [Place(where(MB=0), [0]), Split("MB", 2)],
            "place (directive 1 of 2): no region has the tag MB\n"
            '  fix: write Split("MB", n) before this directive',
        ),
        (
            [Place(where(PP=1), [0]), Place(where(PP=1), [1])],
            "place (directive 2 of 2): PP1 is already on devices [0], not [1]\n"
            "  fix: match each region with exactly one `Place`, or give both the same devices",
        ),
    ],
    ids=[
        "no such index",
        "no such pass",
        "misspelt",
        "no experts",
        "misspelt case",
        "too early",
        "twice",
    ],
)
def test_a_place_that_cannot_be_done_is_refused(program: list, message: str) -> None:
    with pytest.raises(DirectiveError) as refused:
        apply(program, training_dag(chain(3)))

    assert str(refused.value) == message


def test_a_key_that_only_some_regions_lack_is_known() -> None:
    with pytest.raises(DirectiveError) as refused:
        apply([Place(where(PP=None), [0])], training_dag(chain(2)))

    assert str(refused.value) == (
        "place (directive 1 of 1): where(PP=None) matches nothing\n"
        "  fix: choose from what exists: PP: 0, 1"
    )
