"""Stage: layers become stages, whatever the model's own tags are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, islice, pairwise
from random import Random

import pytest
from draws import one_of
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic import chain

from piper import Place, Split, Stage, Strategy, where
from piper.directives import apply
from piper.errors import DirectiveError, Refused
from piper.ir.model import Model
from piper.ir.partition.balance import Memory, balanced, smallest_limit
from piper.ir.training import training_dag
from piper.ir.values import TensorSpec
from piper.names import F
from piper.strategies import BUILDERS

MIB = TensorSpec((2**18,), "float32")


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

    assert [one["PP"] for one in stages(model, Stage("PP", 3))] == [0, 0, 0, 1, 1, 1, 1, 2]


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

    assert sizes and sum(sizes) == len(weights) and len(sizes) == stages and min(sizes) >= 1
    best = min(heaviest(weights, cut) for cut in cuts(len(weights), stages))
    assert heaviest(weights, sizes) <= best * (1 + 1e-9)


@given(st.data(), st.integers(1, 4), st.integers(4, 8), st.floats(0.05, 1.0))
def test_no_cut_that_fits_into_memory_is_lighter(
    data: st.DataObject, stages: int, layers: int, part: float
) -> None:
    draw = lambda: data.draw(st.lists(st.floats(0.1, 10), min_size=layers, max_size=layers))  # noqa: E731
    weights, state, kept = draw(), draw(), draw()
    live = tuple(range(stages, 0, -1))
    memory = Memory(state, kept, live, part * (sum(state) + sum(kept) * stages))
    every = [cut for cut in cuts(layers, stages) if fullest(memory, cut) <= memory.limit]

    sizes = balanced(weights, stages, memory)

    if sizes is None:
        assert not every
        least = min(fullest(memory, cut) for cut in cuts(layers, stages))
        assert smallest_limit(memory, stages) == pytest.approx(least)
    else:
        assert fullest(memory, sizes) <= memory.limit * (1 + 1e-9)
        best = min((heaviest(weights, cut) for cut in every), default=float("inf"))
        assert heaviest(weights, sizes) <= best * (1 + 1e-9)


def cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every cut there is."""
    ends = [(0, *cut, layers) for cut in combinations(range(1, layers), stages - 1)]
    return [tuple(b - a for a, b in pairwise(one)) for one in ends]


def heaviest(weights: list[float], sizes: tuple[int, ...]) -> float:
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return max(sum(weights[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def fullest(memory: Memory, sizes: tuple[int, ...]) -> float:
    layers = iter(range(sum(sizes)))
    return max(
        sum(memory.state[k] + memory.live[stage] * memory.kept[k] for k in islice(layers, size))
        for stage, size in enumerate(sizes)
    )


def test_stages_that_hold_more_microbatches_get_fewer_layers() -> None:
    model = layered(*(f"L{k}" for k in range(8)))
    kept = replace(model, regions=tuple(replace(r, saved=(MIB,)) for r in model.regions))

    plenty = stages(kept, Stage("PP", 2, live=[3, 1], memory_gib=100 / 1024))
    little = stages(kept, Stage("PP", 2, live=[3, 1], memory_gib=7 / 1024))

    assert [one["PP"] for one in plenty] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [one["PP"] for one in little] == [0, 0, 1, 1, 1, 1, 1, 1]
    with pytest.raises(DirectiveError) as error:
        stages(kept, Stage("PP", 2, live=[3, 1], memory_gib=5 / 1024))
    assert str(error.value) == (
        "stage (directive 1 of 1): no cut into 2 stages fits into 0.004883 GiB per stage\n"
        "  fix: write memory_gib=0.00587 or more, use more stages or smaller microbatches, or "
        "shard and recompute"
    )


@pytest.mark.parametrize(
    "wrong", [{"live": [1]}, {"live": 3}, {"live": [0, 1]}, {"memory_gib": 0}, {"state": "4"}]
)
def test_memory_must_be_numbers(wrong: dict[str, object]) -> None:
    with pytest.raises(Refused, match="write"):
        Stage("PP", 2, **wrong)  # type: ignore[arg-type]


def test_its_memory_is_part_of_its_json_and_repr_where_it_is_given() -> None:
    stage = Stage("PP", 2, live=(2, 1), memory_gib=7.5)

    assert repr(stage) == "Stage(name='PP', stages=2, live=(2, 1), memory_gib=7.5)"
    assert Strategy.from_json(Strategy([stage]).to_json()) == Strategy([stage])
    assert repr(Stage("PP", 2)) == "Stage(name='PP', stages=2)"


@one_of(2)
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
