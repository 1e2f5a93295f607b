"""Slots that run ahead hide messages. Where that would keep a stage waiting, they run in turn."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from capture.division.models import cross_entropy, llama

from piper import Strategy, strategies
from piper.costs import Costs
from piper.job.batch.batch import Batch
from piper.job.compile.pricing import price
from piper.job.job import Job
from piper.job.options import Options

WITHIN = 1.01
BUILDERS = {"1f1b": strategies.one_f_one_b, "zb-h1": strategies.zb_h1, "gpipe": strategies.gpipe}
FAST, EQUAL, SLOW = 1e8, 1e7, 2e6  # bytes per second: equal ones send as long as they compute


@cache
def job_of(stages: int) -> Job:
    one = strategies.one_f_one_b(pp=1, microbatches=1)
    return Job(llama(stages, layers=4), cross_entropy, one, Options(optimizer=torch.optim.SGD))


def seconds(pp: int, strategy: Strategy, link: float, microbatches: int) -> float:
    tokens = torch.zeros(2 * microbatches, 8, dtype=torch.long)
    costs = Costs(link=link, flops=1e9, memory=1e12, latency=1e-6)
    _, compiled = job_of(pp).under(strategy).compile(Batch.of((tokens, tokens)), costs)
    return price(compiled, costs).seconds


def times(name: str, pp: int, microbatches: int, link: float) -> tuple[float, float]:
    """As the builder does it, and in turn."""
    how = {"pp": pp, "microbatches": microbatches, "tp": 2}
    ours = seconds(pp, BUILDERS[name](**how), link, microbatches)
    return ours, seconds(pp, BUILDERS[name](**how, ahead=False), link, microbatches)


@pytest.mark.soak
def test_weight_gradients_of_a_zero_bubble_schedule_hide_messages_as_those_of_1f1b() -> None:
    whole, _ = times("1f1b", 2, 4, EQUAL)
    split, in_turn = times("zb-h1", 2, 4, EQUAL)

    assert split <= WITHIN * whole
    assert split < 0.95 * in_turn


@pytest.mark.soak
def test_slots_run_in_turn_where_that_is_faster() -> None:
    ours, in_turn = times("zb-h1", 2, 2, FAST)

    assert ours <= WITHIN * in_turn


@pytest.mark.soak
@pytest.mark.parametrize("link", [FAST, EQUAL, SLOW])
@pytest.mark.parametrize("microbatches", [2, 3, 4])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_overlap_is_never_slower_than_slots_in_turn(
    name: str, pp: int, microbatches: int, link: float
) -> None:
    ours, in_turn = times(name, pp, microbatches, link)

    assert ours <= WITHIN * in_turn
