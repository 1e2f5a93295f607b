"""Stage: layers become stages, whatever the model's own tags are."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic import chain

from piper import Place, Split, Stage, where
from piper.directives import apply
from piper.errors import DirectiveError, Refused
from piper.ir.balance import balanced
from piper.ir.model import Model
from piper.ir.training import training_dag
from piper.names import F
from piper.strategies import BUILDERS


def layered(*tags: str, flops: list[float] | None = None) -> Model:
    """A chain with these outermost tags; "" is a region without one."""
    model = chain(len(tags))
    work = flops or [0.0] * len(tags)
    regions = tuple(
        replace(region, tags=((tag[:-1], int(tag[-1])),) if tag else (), flops={F: cost})
        for region, tag, cost in zip(model.regions, tags, work, strict=True)
    )
    return replace(model, regions=regions)


def stages(model: Model, stage: Stage) -> list[dict[str, int]]:
    dag = apply([stage], training_dag(model))
    assert all(dict(n.tags) == dict(dag.model.by_id[n.region].tags) for n in dag.computes)
    return [dict(region.tags) for region in dag.model.regions]


def test_layers_get_the_tag_of_their_stage_and_keep_their_own() -> None:
    found = stages(layered("L0", "L1", "L2"), Stage("PP", [1, 2]))

    assert found == [{"PP": 0, "L": 0}, {"PP": 1, "L": 1}, {"PP": 1, "L": 2}]


def test_what_has_no_tag_joins_its_neighbour() -> None:
    found = stages(layered("", "L0", "", "L1", ""), Stage("PP", 2))

    assert [one["PP"] for one in found] == [0, 0, 0, 1, 1]


def test_a_model_without_tags_is_one_stage() -> None:
    assert stages(layered("", "", ""), Stage("PP", 1)) == [{"PP": 0}] * 3


def test_stages_that_the_model_has_stay_as_they_are() -> None:
    model = chain(4)

    assert stages(model, Stage("PP", 4)) == [dict(region.tags) for region in model.regions]


def test_more_stages_than_asked_for_are_grouped() -> None:
    assert [one["PP"] for one in stages(chain(4), Stage("PP", 2))] == [0, 0, 1, 1]


def test_a_heavy_head_has_a_stage_with_fewer_layers() -> None:
    model = layered(*(f"L{k}" for k in range(8)), flops=[1.0] * 7 + [3.5])

    assert [one["PP"] for one in stages(model, Stage("PP", 3))] == [0, 0, 0, 0, 1, 1, 1, 2]


def test_it_may_come_after_the_split() -> None:
    before = apply([Stage("PP", 2), Split("MB", 2)], training_dag(chain(4)))
    after = apply([Split("MB", 2), Stage("PP", 2)], training_dag(chain(4)))

    assert {n.id: dict(n.tags) for n in before.computes} == {
        n.id: dict(n.tags) for n in after.computes
    }


@pytest.mark.parametrize(
    ("model", "stage", "message"),
    [
        (layered("L0", "L1"), Stage("PP", 3), "the model has 2 layers, too few for 3 stages"),
        (layered("", ""), Stage("PP", 2), "the model has 1 layer, too few for 2 stages"),
        (
            layered("L0", "L1", "L2"), Stage("PP", [1, 1]),
            "the stages [1, 1] have 2 layers, but the model has 3",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_says_what_to_write(model: Model, stage: Stage, message: str) -> None:
    with pytest.raises(DirectiveError, match="fix: ") as error:
        stages(model, stage)

    assert error.value.problems[0].what == message


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, [], [1, 0], "four", [True]])
def test_stages_must_be_numbers(wrong: object) -> None:
    with pytest.raises(Refused, match="Stage"):
        Stage("PP", wrong)  # type: ignore[arg-type]


@example([1.0, 7.96605223184991, 1.9446717915193752], 1)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(1, 5))
def test_the_heaviest_stage_is_as_light_as_it_can_be(weights: list[float], stages: int) -> None:
    stages = min(stages, len(weights))

    sizes = balanced(weights, stages)

    assert sum(sizes) == len(weights) and len(sizes) == stages and min(sizes) >= 1
    assert heaviest(weights, sizes) <= lightest(weights, stages) * (1 + 1e-9)


def heaviest(weights: list[float], sizes: tuple[int, ...]) -> float:
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return max(sum(weights[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def lightest(weights: list[float], stages: int) -> float:
    """Every cut, tried."""
    if stages == 1:
        return sum(weights)
    last = range(1, len(weights) - stages + 2)
    return min(max(sum(weights[:k]), lightest(weights[k:], stages - 1)) for k in last)


@pytest.mark.parametrize("name", BUILDERS)
def test_one_model_goes_through_every_builder(name: str) -> None:
    model = layered("", *(f"L{k}" for k in range(9)), "")

    for pp in (2, 4) if name == "dualpipe" else (1, 2, 4):
        dag = apply(BUILDERS[name](pp=pp, microbatches=8), training_dag(model))

        assert all(node.devices for node in dag.computes)


def test_a_strategy_by_hand_places_stages() -> None:
    random = Random(0)
    model = layered(*(f"L{k}" for k in range(6)), flops=[random.random() for _ in range(6)])
    places = [Place(where(PP=k), [k]) for k in range(3)]

    dag = apply([Stage("PP", 3), *places], training_dag(model))

    assert {node.devices for node in dag.computes} == {(0,), (1,), (2,)}
