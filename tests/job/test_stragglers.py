"""A device that is persistently slower than the others is named, with where it loses its time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from draws import drawn, draws, every
from pool import run_on
from slow_jobs import SLEEP, train_slowly

from piper.job.processes import stragglers
from piper.job.processes.consistency import DeviceTimes
from piper.job.processes.stragglers import (
    WINDOW,
    Stragglers,
    peers_of,
    ratios,
    references,
    straggler,
    typical,
)
from piper.runtime.metrics import Metrics, Readings, Slowest
from piper.runtime.observe.gpu_time import EVERY
from piper.runtime.observe.own_time import OwnTime, now
from piper.runtime.processes.activity import waiting


def steps(
    work: Sequence[float], roles: Sequence[int], draw: random.Random, noise: float = 0.1
) -> list[tuple[DeviceTimes, ...]]:
    """Steps of devices that take so many seconds, but for chance."""
    return [
        tuple((one * draw.uniform(1, 1 + noise), 1e-4, role)
              for one, role in zip(work, roles, strict=True))
        for _ in range(WINDOW)
    ]  # fmt: skip


@drawn
def test_the_slow_one_of_many_is_found_and_no_other() -> None:
    draw = random.Random(0)
    for _ in range(draws(100, 3000)):
        stages, copies = draw.randint(1, 4), draw.randint(2, 4)
        costs = [draw.uniform(0.02, 0.1) for _ in range(stages)]
        roles = [k % stages for k in range(stages * copies)]
        work, slow = [costs[role] for role in roles], draw.randrange(len(roles))
        even = steps(work, roles, draw)
        assert straggler(even, [1.0] * len(roles)) is None

        work[slow] *= draw.uniform(1.5, 4.0)
        found = straggler(steps(work, roles, draw), [1.0] * len(roles))

        assert found is not None and found.device == slow
        assert found.seconds == pytest.approx(work[slow], rel=0.15)
        assert found.others == pytest.approx(costs[roles[slow]], rel=0.15)


@drawn
def test_a_stage_without_replicas_is_compared_with_itself() -> None:
    """Stages may be unequal. One that becomes slower than it was is named."""
    draw = random.Random(1)
    for _ in range(draws(100, 3000)):
        work = [draw.uniform(0.02, 0.1) for _ in range(draw.randint(2, 5))]
        roles, slow = range(len(work)), draw.randrange(len(work))
        before = steps(work, roles, draw)
        usual = ratios(typical(before))
        assert straggler(steps(work, roles, draw), usual) is None

        work[slow] = 3.0 * max(work)
        found = straggler(steps(work, roles, draw), usual)

        assert found is not None and found.device == slow


def test_chance_and_noise_of_python_are_not_named() -> None:
    draw = random.Random(2)
    rows = steps([0.05, 0.05, 0.05], [0, 0, 0], draw)
    often = [
        tuple((9.0 if k == 1 and step % 2 else s, t, role) for k, (s, t, role) in enumerate(row))
        for step, row in enumerate(rows)
    ]

    assert straggler(often, [1.0] * 3) is None
    assert straggler(steps([1e-3, 2e-3], [0, 0], draw), [1.0] * 2) is None


def test_of_two_each_is_compared_with_the_other() -> None:
    row = ((1.0, 0.0, 0), (3.0, 0.0, 0), (5.0, 0.0, 7))

    assert references(row) == [3.0, 1.0, 3.0]
    assert peers_of(row, 0) == [1]
    assert peers_of(row, 2) == [0, 1]


def test_many_devices_are_compared_in_little_time() -> None:
    draw = random.Random(3)
    rows = steps([0.05] * 2048, [k % 8 for k in range(2048)], draw)
    began = time.process_time()

    straggler(rows, [1.0] * 2048)

    assert time.process_time() - began < 2.0


def test_waits_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 10.0, 14.0, 14.0, 15.0)).__next__
    monkeypatch.setattr("piper.runtime.observe.own_time.now", clock)
    own = OwnTime()

    own.begin()
    with own.stepping(NoProgram(), look=False):  # type: ignore[arg-type]
        pass

    assert own.taken() == (4.0, 1.0)


def test_the_clock_of_work_stands_still_in_a_wait() -> None:
    before = now()
    with waiting("a peer", (1,)):
        time.sleep(0.05)

    assert now() - before < 0.04


class NoProgram:
    """Stands for a program; its instructions take as long as they say."""

    faster = plan = device = None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stragglers]:
    """Steps of two replicas, as the process of device 0 sees them."""

    def begin(count: int, inside: float, between: float, seconds: dict[str, float]) -> Stragglers:
        mine = {"PP0:F": 0.02, "PP0:B": 0.03}
        monkeypatch.setattr(stragglers, "everyone", lambda one, _: [one, {**mine, **seconds}])
        monkeypatch.setattr("piper.runtime.observe.own_time.timed", lambda _: Noted(mine))
        monkeypatch.setattr(stragglers, "on_compute_stream", lambda *_: nullcontext())
        found = Stragglers(0, torch.device("cpu"))
        for _ in range(count):
            found.see(((0.05, 0.001, 0), (inside, between, 0)))
            with found.stepping(NoProgram()):  # type: ignore[arg-type]
                pass
        return found

    return begin


class Noted:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def __enter__(self) -> dict[str, float]:
        return self.seconds

    def __exit__(self, *_: object) -> None: ...


def test_it_says_once_where_the_time_is_lost(
    run: Callable[..., Stragglers], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        found = run(3 * WINDOW, 0.09, 0.001, {"PP0:B": 0.07}).found

    assert found is not None
    assert (found.device, found.where) == (1, "PP0:B")
    assert found.lost == pytest.approx(0.04)
    assert [one.getMessage() for one in caplog.records] == [
        "device 1 works 91.0 ms of each step, the others 51.0 ms: 40.0 ms more in PP0:B"
    ]


def test_a_slow_loader_is_between_steps(run: Callable[..., Stragglers]) -> None:
    found = run(WINDOW + 4, 0.05, 0.04, {}).found

    assert found is not None and found.where == "between steps"
    assert str(found).endswith("39.0 ms more between steps")


def test_nothing_is_said_of_equal_devices(run: Callable[..., Stragglers]) -> None:
    found = run(3 * WINDOW, 0.052, 0.001, {})

    assert found.found is None and found.looks == 0
    assert Metrics(1, 1, None, lambda: Readings(1.0, 1.0, 1.0, 1.0)).slowest is None
    assert str(Slowest(2, 0.2, 0.1)) == "device 2 works 200.0 ms of each step, the others 100.0 ms"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("slow", "where", "named"),
    every(3, [(1, "PP1:F", "PP1:F"), (0, "PP0:B", "PP0:B"), (1, "loader", "between steps")]),
)
def test_processes_name_the_slow_one(slow: int, where: str, named: str) -> None:
    found = run_on(2, train_slowly, slow, where, WINDOW + 6)

    assert [one[:2] for one in found] == [(slow, named)] * 2
    assert all(SLEEP / 2 < one[2] < 3 * SLEEP for one in found)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("slow", "where", "named"),
    every(3, [(0, "PP0:B", "PP0:B"), (1, "PP1:F", "PP1:F"), (1, "loader", "between steps")]),
)
def test_marks_of_a_device_name_the_slow_one(slow: int, where: str, named: str) -> None:
    sleep = SLEEP / 2  # there are many steps
    found = run_on(2, train_slowly, slow, where, EVERY * (WINDOW + 4), sleep, True)

    assert [one[:2] for one in found] == [(slow, named)] * 2
    assert all(sleep / 2 < one[2] < 3 * sleep for one in found)


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("marks", [False, True])
def test_processes_of_equal_speed_name_nobody(marks: bool) -> None:
    found = run_on(2, train_slowly, 0, "", EVERY * (WINDOW + 4), 0.0, marks)

    assert [one[0] for one in found] == [None] * 2
