"""Experts divided over devices that are threads: every schedule, with every level."""

from itertools import product
from typing import Any

import pytest
from draws import every, one_of
from replicas import ADAMW, STEPS, batches, captured, close, close_tensors, plain
from runtime.test_replicate import LEVELS, legal, stages_of
from runtime.test_shard import ROUTINGS
from shared_capture import using

from piper.directives import Strategy
from piper.job.programs.rehearsal import rehearse
from piper.strategies import BUILDERS


def rehearsed(strategy: Strategy, replicas: int, routing: str) -> None:
    """All devices as threads of this process."""
    stages, parts = stages_of(strategy), replicas * strategy.microbatches
    name, wanted = f"moe {routing}", plain(f"moe {routing}", stages, parts, parts)
    model, loss, known = captured(name, stages, 1)
    with using(known):
        found = rehearse(model, loss, strategy, batches(name, parts), optimizer=ADAMW)
    for step in range(STEPS):
        close(dict(found.parts[step]), wanted.losses[step], f"losses of step {step}")
        close({0: found.grad_norms[step]}, {0: wanted.norms[step]}, "norm")
        close({0: found.losses[step]}, {0: wanted.loss[step]}, "loss")
    for part in wanted.parameters:
        close_tensors(found.parameters[part.name].flatten(), part.values, part.name)


FIRST = every(len(BUILDERS), BUILDERS)  # others are among those with every level


@pytest.mark.parametrize(("schedule", "zero"), every(50, product(BUILDERS, LEVELS)))
def test_every_schedule_with_every_level_on_experts(schedule: str, zero: int) -> None:
    """PP=2 x DP=4 (DualPipe: DP=2, twice), EP=2: two devices have the same experts."""
    dp = 2 if schedule == "dualpipe" else 4
    rehearsed(legal(schedule, 2, dp=dp, ep=2, zero=zero), 4, ROUTINGS[zero])


@pytest.mark.parametrize("schedule", FIRST)
def test_every_schedule_with_an_expert_on_each_device(schedule: str) -> None:
    """EP=4."""
    dp = 2 if schedule == "dualpipe" else 4
    rehearsed(legal(schedule, 2, dp=dp, ep=4, zero=2), 4, "skewed")


@pytest.mark.parametrize("pp", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_dualpipev_on_more_ranks_pairs_the_right_messages(pp: int) -> None:
    """With three ranks and more the published system pairs sends with the wrong receives."""
    rehearsed(legal("dualpipev", pp, dp=2, ep=2, zero=2), 2, "skewed")


@pytest.mark.parametrize("schedule", FIRST)
def test_every_schedule_with_slots_that_overlap(schedule: str) -> None:
    """EP=2; DualPipe has two replicas on the same devices."""
    dp, replicas = (1, 2) if schedule == "dualpipe" else (2, 2)
    rehearsed(legal(schedule, 2, dp=dp, ep=2, zero=2, ahead="pairs"), replicas, "skewed")


@one_of(2)
@pytest.mark.parametrize(
    ("schedule", "zero", "options"),
    [
        pytest.param("dualpipev", 3, {"mesh": "pp,dp"}, marks=pytest.mark.soak),
        ("1f1b", 2, {"mesh": "dp,pp,ep"}),
        ("zbv", 1, {"devices": [5, 2, 7, 0, 3, 6, 1, 4]}),
    ],
)
def test_devices_may_be_numbered_in_any_way(schedule: str, zero: int, options: Any) -> None:
    """PP=2 x DP=4, EP=2."""
    rehearsed(legal(schedule, 2, dp=4, ep=2, zero=zero, **options), 4, "skewed")
