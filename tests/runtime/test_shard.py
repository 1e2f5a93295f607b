"""Experts divided over devices train as one process that has all of them."""

import pytest
from draws import drawn, draws, every
from pool import run_on
from replicas import assert_same, plain, train_all
from runtime.test_replicate import LEVELS, legal, stages_of

from piper.directives import Place, Replicate, Shard, Split, Strategy
from piper.ir.filters import where

ROUTINGS = ("spread", "skewed", "one", "none")


def agree(world: int, strategies: list[Strategy], replicas: int, routings: list[str]) -> None:
    """Every strategy with a routing of its own."""
    stages, parts = stages_of(strategies[0]), replicas * strategies[0].microbatches
    for routing in dict.fromkeys(routings):
        mine = [s for s, r in zip(strategies, routings, strict=True) if r == routing]
        texts = [strategy.to_json() for strategy in mine]
        runs = run_on(world, train_all, f"moe {routing}", stages, parts, texts)
        for of_strategy in zip(*runs, strict=True):
            assert_same(of_strategy, plain(f"moe {routing}", stages, parts, parts))


@pytest.mark.parametrize("schedule", every(2, ["dualpipev", "dualpipe"]))
@drawn
def test_pipelines_of_experts_with_every_level(schedule: str) -> None:
    """PP=2 x EP=2 on four processes; another routing at every level."""
    strategies = [legal(schedule, 2, dp=2, ep=2, zero=zero) for zero in LEVELS]

    some = slice(draws(1, 0), None, draws(2, 1))
    agree(4, strategies[some], 4 if schedule == "dualpipe" else 2, list(ROUTINGS[some]))


def test_pairs_of_passes_that_overlap_with_their_neighbours() -> None:
    """PP=2 x EP=2 on four processes; weight gradients come slots later than they are listed."""
    options = {"dp": 2, "ep": 2, "ahead": "pairs"}
    strategies = [legal("dualpipev", 2, zero=zero, **options) for zero in (1, 3)]

    agree(4, strategies, 2, ["skewed", "none"])


def sharded(groups: object, zero: int, of_experts: int | None = None) -> Strategy:
    """Four replicas, one stage, with levels of their own for the dense part and for experts."""
    devices = [0, 1, 2, 3]
    dense = [Replicate(where(EP=None), devices, zero=zero, gather_buffers=1)]
    more = [Replicate(where(EP="*"), devices, zero=of_experts or 0, gather_stream="gather")]
    place = Place(where(PP=0), devices)
    return Strategy([place, *dense, *more, Shard(where(EP="*"), groups), Split("MB", 2)])


@drawn
def test_groups_of_experts_with_every_level_on_them() -> None:
    """EP=2 of DP=4: the devices with the same experts share their state, or keep it whole."""
    strategies = [sharded([[0, 1], [2, 3]], 3 - zero, zero) for zero in LEVELS]
    strategies += [sharded([[0, 2], [3, 1]], zero, 2) for zero in LEVELS]

    some = slice(None, None, draws(3, 1))
    agree(4, strategies[some], 4, [*ROUTINGS, *ROUTINGS][some])


@drawn
def test_one_expert_on_each_device() -> None:
    """EP=4."""
    some = slice(None, None, draws(2, 1))
    strategies = [sharded([0, 1, 2, 3], zero) for zero in LEVELS]
    agree(4, strategies[some], 4, list(ROUTINGS[some]))
