"""A program of directives: applied in order, checked after each step, signed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from synthetic import chain, frozen

from piper import errors
from piper.directives import Order, Place, Split, Strategy, apply
from piper.errors import DirectiveError, PassError, Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.training import training_dag
from piper.job.compile.compiler import compile_strategy


def test_the_same_program_gives_the_same_dag() -> None:
    program = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", 3)]

    one, other = (apply(program, training_dag(chain(2))) for _ in range(2))

    assert list(one.nodes.items()) == list(other.nodes.items())
    assert list(one.values.items()) == list(other.values.items())


def test_place_and_split_may_change_places() -> None:
    places, split = [Place(where(PP=0), [0]), Place(where(PP=1), [1])], Split("MB", 3)

    one = apply([*places, split], training_dag(chain(2)))
    other = apply([split, *places], training_dag(chain(2)))

    assert one.nodes == other.nodes


def test_an_empty_program_changes_nothing() -> None:
    dag = training_dag(chain(2))

    assert apply([], dag).nodes == dag.nodes


class Breaks:
    """A directive with a bug: it loses a node."""

    def rewrite(self, dag: Dag) -> Dag:
        return replace(dag, nodes={k: v for k, v in dag.nodes.items() if k != "PP0:B"})


def test_a_directive_that_breaks_the_dag_is_caught_and_named() -> None:
    with pytest.raises(DirectiveError) as refused:
        apply([Place(where(), [0]), Breaks()], training_dag(chain(1)))

    assert str(refused.value) == (
        "breaks (directive 2 of 2): PP0:U reads g:PP0/PP0, which nothing writes\n"
        "  fix: this is a bug of Piper, please report it with the strategy\n"
        "breaks (directive 2 of 2): totals reads g:PP0/PP0, which nothing writes\n"
        "  fix: this is a bug of Piper, please report it with the strategy"
    )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            [Place(where(PP=0), [0])],
            "strategy: PP1 has no device\n  fix: add Place(where(PP=1), devices=[...])",
        ),
        (
            [Place(where(PP=0), [0]), Place(where(PP=1, PASS="F"), [1]),
             Place(where(PP=1, PASS="B"), [0])],
            "strategy: PP1:B is on devices [0], its forward on devices [1]\n"
            "  fix: place a region's passes together: leave PASS out of the filter of `Place`",
        ),
        (
            [Place(where(PP=0), [0]), Place(where(PP=1, PASS="F"), [1])],
            "strategy: PP1 has no device\n  fix: add Place(where(PP=1), devices=[...])",
        ),
        (
            [Place(where(PP=0), [0]), Split("MB", 2), Place(where(PP=1, MB=0), [0]),
             Place(where(PP=1, MB=1), [1])],
            "strategy: PP1:F@1 is on devices [1], other parts on devices [0]\n"
            "  fix: place all microbatches of a region on the same devices:"
            " put `Place` before `Split`\n"
            "strategy: PP1:B@1 is on devices [1], other parts on devices [0]\n"
            "  fix: place all microbatches of a region on the same devices:"
            " put `Place` before `Split`",
        ),
        (
            [Place(where(PP=0), [0, 3]), Place(where(PP=1), [1, 2])],
            "strategy: PP0 is on devices [0, 3], and nothing keeps its replicas equal\n"
            "  fix: add Replicate(where(PP=0), devices=[0, 3])\n"
            "strategy: PP1 is on devices [1, 2], and nothing keeps its replicas equal\n"
            "  fix: add Replicate(where(PP=1), devices=[1, 2])",
        ),
    ],
    ids=["not placed", "backward elsewhere", "backward nowhere", "microbatches apart", "replicas"],
)  # fmt: skip
def test_a_strategy_that_leaves_something_open_is_refused(program: list, message: str) -> None:
    with pytest.raises(PassError) as refused:
        compile_strategy(chain(2), program)

    assert str(refused.value) == message


def test_a_region_on_fewer_devices_has_several_replicas_on_each() -> None:
    program = [Place(where(PP=0), [0]), Place(where(PP=1), [1, 2])]

    compiled = compile_strategy(frozen(chain(2)), program)

    assert {node.region: node.devices for node in compiled.dag.computes} == {
        "PP0": (0, 0), "PP1": (1, 2),
    }  # fmt: skip


@pytest.mark.parametrize("devices", [([0, 1], [1, 0]), ([0, 2], [0, 3]), ([0, 1], [1, 2])], ids=str)
def test_replicas_that_meet_on_a_device_compile_or_are_refused_in_the_users_words(
    devices: tuple[list[int], list[int]],
) -> None:
    program = [Place(where(PP=0), devices[0]), Place(where(PP=1), devices[1])]

    try:
        compile_strategy(frozen(chain(2)), program)
    except Refused as refused:
        assert not isinstance(refused, errors.PlanError), str(refused)


def test_a_region_without_tags_gets_a_fix_that_means_only_it() -> None:
    model = chain(2)
    bare = replace(model, regions=(replace(model.regions[0], tags=()), model.regions[1]))

    with pytest.raises(PassError) as refused:
        compile_strategy(bare, [Place(where(PP=1), [0])])

    assert str(refused.value) == (
        "strategy: PP0 has no device\n  fix: add Place(where(PP=None), devices=[...])"
    )


def failing(act: Callable[[], object]) -> Exception:
    with pytest.raises(errors.PiperError) as caught:
        act()
    return caught.value


RAISED: dict[str, Callable[[], object]] = {
    "where": lambda: where(PASS="X"),
    "directive": lambda: apply([Place(where(PP=9), [0])], training_dag(chain(1))),
    "cycle": lambda: apply(
        [Place(where(), [0]), Order([where(PASS="B"), where(PASS="F")])], training_dag(chain(2))
    ),
    "json": lambda: Strategy.from_json("[1"),
    "json row": lambda: Strategy.from_json('[{"op": "order"}]'),
    "pass": lambda: compile_strategy(chain(3), []),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_error_survives_pickle_with_its_text(name: str) -> None:
    error = failing(RAISED[name])

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.problems == error.problems


@pytest.mark.parametrize(
    "error",
    [
        Refused(Problem("a", "b"), Problem("c", "d")),
        *(
            kind("here", Problem("a", "b"), Problem("c", "d"))
            for kind in errors.Located.__subclasses__()
        ),
        errors.RunError(1, "run F", "no memory"),
        errors.PeerLost(1, "recv h0", "it is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_kind_of_error_survives_pickle(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_refusal_names_its_place_for_every_problem() -> None:
    error = DirectiveError("place (directive 1 of 2)", Problem("a", "b"), Problem("c", "d"))

    assert str(error) == (
        "place (directive 1 of 2): a\n  fix: b\nplace (directive 1 of 2): c\n  fix: d"
    )


def test_buffers_that_regions_on_two_devices_update_are_refused() -> None:
    """Each device would go on with its own copy, and nothing would ever make them equal."""
    model = chain(2, tied=True)
    buckets = {
        **model.buckets,
        "tied": replace(model.buckets["tied"], trainable=False, buffers=True),
    }
    regions = tuple(replace(region, stateful=True) for region in model.regions)
    shared = replace(model, buckets=buckets, regions=regions)

    with pytest.raises(Refused):
        compile_strategy(shared, [Place(where(PP=0), [0]), Place(where(PP=1), [1])])
