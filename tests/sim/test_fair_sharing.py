"""What shares links and cores: nothing is used beyond its capacity, and all work is done."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.sim.fair_sharing import Demand, FairSharing

LITTLE = 1e-9


@dataclass(frozen=True)
class Job:
    """Something that begins at a time; `fastest` is parts of it a second."""

    begins: float
    demands: tuple[Demand, ...]
    fastest: float = 1e9


def run(capacity: list[float], jobs: list[Job]) -> tuple[list[float], float]:
    """When each ends, and the fullest that any resource ever was, as a share of its capacity."""
    sharing, ends, fullest = FairSharing(), [0.0] * len(jobs), 0.0
    for one in capacity:
        sharing.resource(one)
    waiting = sorted(range(len(jobs)), key=lambda k: jobs[k].begins)
    while waiting or sharing.active:
        soonest = sharing.next_end()
        if waiting and (soonest is None or jobs[waiting[0]].begins <= soonest):
            k = waiting.pop(0)
            sharing.begin(k, jobs[k].begins, jobs[k].demands, jobs[k].fastest)
        else:
            assert soonest is not None
            ends[sharing.end()] = soonest
        fullest = max(fullest, *(used(sharing, r) / capacity[r] for r in range(len(capacity))))
    return ends, fullest


def used(sharing: FairSharing, resource: int) -> float:
    return sum(
        one.speed * amount
        for one in sharing.active.values()
        for r, amount in one.demands
        if r == resource
    )


def test_two_equal_flows_take_twice_as_long() -> None:
    alone, _ = run([100.0], [Job(0, ((0, 100.0),))])
    both, _ = run([100.0], [Job(0, ((0, 100.0),))] * 2)

    assert alone == [1.0]
    assert both == [2.0, 2.0]


def test_a_third_that_starts_later_slows_them_down_from_then_on() -> None:
    """Two of 100 bytes at 50 a second; after a second three share: 50 left each take 1.5 s more,
    then the third has 50 left and the link for itself."""
    ends, _ = run([100.0], [Job(0, ((0, 100.0),)), Job(0, ((0, 100.0),)), Job(1, ((0, 100.0),))])

    assert ends == pytest.approx([2.5, 2.5, 3.0])


def test_what_another_link_holds_back_leaves_its_share_to_others() -> None:
    """The first is held to 10 a second by its other link, so the second has 90."""
    ends, _ = run([100.0, 10.0], [Job(0, ((0, 100.0), (1, 100.0))), Job(0, ((0, 90.0),))])

    assert ends == pytest.approx([10.0, 1.0])


def test_three_on_two_cores_take_half_as_long_again() -> None:
    ends, _ = run([2.0], [Job(0, ((0, 1.0),), fastest=1.0)] * 3)

    assert ends == pytest.approx([1.5, 1.5, 1.5])


def test_one_thread_takes_no_more_than_one_core() -> None:
    ends, _ = run([8.0], [Job(0, ((0, 1.0),), fastest=1.0)])

    assert ends == [1.0]


CAPACITY = st.lists(st.floats(0.5, 50.0), min_size=1, max_size=4)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[float], list[Job]]:
    capacity = draw(CAPACITY)
    demand = st.tuples(st.integers(0, len(capacity) - 1), st.floats(0.1, 20.0))
    some = st.lists(demand, min_size=1, max_size=3, unique_by=lambda one: one[0]).map(tuple)
    job = st.builds(Job, st.floats(0.0, 5.0), some, st.sampled_from([0.3, 1.0, 1e9]))
    return capacity, draw(st.lists(job, min_size=1, max_size=7))


@settings(max_examples=40)
@given(worlds())
def test_no_resource_is_used_beyond_its_capacity(world: tuple[list[float], list[Job]]) -> None:
    _, fullest = run(*world)

    assert fullest <= 1 + LITTLE


@settings(max_examples=40)
@given(worlds())
def test_nothing_ends_before_its_work_can_be_done(world: tuple[list[float], list[Job]]) -> None:
    """Each alone, and all together on every resource."""
    capacity, jobs = world
    ends, _ = run(capacity, jobs)

    for end, job in zip(ends, jobs, strict=True):
        needed = max(1 / job.fastest, *(amount / capacity[r] for r, amount in job.demands))
        assert end - job.begins >= needed * (1 - LITTLE)
    for resource, most in enumerate(capacity):
        asked = sum(amount for job in jobs for r, amount in job.demands if r == resource)
        first = min(job.begins for job in jobs)
        assert (max(ends) - first) * most >= asked * (1 - LITTLE)


@settings(max_examples=40)
@given(worlds(), st.floats(1.0, 4.0), st.integers(0, 3))
def test_a_faster_link_never_makes_one_transfer_slower(
    world: tuple[list[float], list[Job]], faster: float, which: int
) -> None:
    capacity, jobs = world
    better = [one * (faster if k == which else 1.0) for k, one in enumerate(capacity)]

    assert run(better, jobs[:1])[0][0] <= run(capacity, jobs[:1])[0][0] * (1 + LITTLE)


@settings(max_examples=40)
@given(worlds())
def test_the_same_gives_the_same(world: tuple[list[float], list[Job]]) -> None:
    assert run(*world) == run(*world)


@settings(max_examples=40)
@given(worlds())
def test_nothing_idles_that_could_go_on(world: tuple[list[float], list[Job]]) -> None:
    """With one thing under way after another, each takes what it takes alone."""
    capacity, jobs = world
    apart = [Job(1e4 * k, job.demands, job.fastest) for k, job in enumerate(jobs)]

    ends, _ = run(capacity, apart)

    for end, job in zip(ends, apart, strict=True):
        alone = max(1 / job.fastest, *(amount / capacity[r] for r, amount in job.demands))
        assert end - job.begins == pytest.approx(alone)
