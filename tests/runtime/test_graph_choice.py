"""`graphs="auto"`: steps with and without graphs train alike, and the faster of them stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import every, one_of
from shared_capture import using
from synthetic import chain
from taped import ADAMW, ROWS, OperatorTape, llama

from piper.errors import InputError
from piper.job.compile.assignment import Assignment
from piper.job.compile.compiler import compile_strategy
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs import rehearsal
from piper.job.programs.rehearsal import Rehearsal, rehearse
from piper.runtime.execute import Faster, Program
from piper.runtime.gpu import graph_choice
from piper.runtime.gpu.cuda_graphs import record_graphs
from piper.runtime.gpu.graph_choice import TIMED, UNTIMED, GraphChoice, is_suited
from piper.strategies import BUILDERS

pytestmark = pytest.mark.usefixtures("old_objects")  # each recording collects garbage
EACH = UNTIMED + TIMED
STEPS = 2 * EACH + 2


class Steps:
    """Takes as long as it says, on a clock of its own."""

    def __init__(self, name: str, seconds: float, ran: list[str]) -> None:
        self.name, self.seconds, self.ran, self.now = name, seconds, ran, 0.0

    def begin(self, batch: Any) -> list[Any]:
        return [(0, lambda: self.ran.append(self.name))]


def choice(
    seconds: dict[str, float],
    fails: bool = False,
    free: tuple[int, int] = (10, 5),
    memory: dict[str, int] | None = None,
) -> tuple[GraphChoice, list[str]]:
    ran: list[str] = []
    plan = SimpleNamespace(instructions=[None], states=(), device=0)
    program: Any = SimpleNamespace(
        plan=plan,
        slots=[],
        device=torch.device("cpu"),
        finish=lambda: None,
        state=SimpleNamespace(buckets={}),
    )

    def record() -> Faster:
        if fails:
            raise torch.OutOfMemoryError("no memory")
        return Steps("graphs", 0.0, ran)

    def clock() -> float:
        return sum(seconds[name] for name in ran)

    def reserved() -> int:
        return (memory or {}).get(ran[-1], 2**30)

    left, plain = iter(free), Steps("plain", 0.0, ran)
    return GraphChoice(program, plain, record, clock, lambda: next(left), reserved), ran


def run(found: GraphChoice, steps: int) -> None:
    for _ in range(steps):
        for _, act in found.begin(None):  # type: ignore[arg-type]
            act()


@one_of(2)
@pytest.mark.parametrize(
    ("seconds", "then"),
    [
        ({"plain": 2.0, "graphs": 1.0}, "graphs"),
        ({"plain": 1.0, "graphs": 2.0}, "plain"),
        ({"plain": 1.0, "graphs": 0.99}, "plain"),  # not worth their memory
    ],
)
def test_the_faster_one_stays(seconds: dict[str, float], then: str) -> None:
    found, ran = choice(seconds)

    run(found, STEPS)

    assert ran == ["plain"] * EACH + ["graphs"] * EACH + [then] * 2
    assert (found.graphs is None) == (then == "plain")  # their memory is free again


@pytest.mark.parametrize(
    ("seconds", "memory", "then"),
    [
        (0.90, 1.05, "graphs"),
        (0.95, 1.06, "plain"),
        (0.50, 1.90, "graphs"),
        (1.10, 0.80, "plain"),  # nobody asked for less memory
    ],
)
def test_graphs_save_a_larger_part_of_the_time_than_they_add_to_the_memory(
    seconds: float, memory: float, then: str
) -> None:
    reserved = {"plain": 1000, "graphs": int(1000 * memory)}
    found, ran = choice({"plain": 1.0, "graphs": seconds}, memory=reserved)

    run(found, STEPS)

    assert ran[-2:] == [then] * 2


def test_one_slow_step_does_not_decide() -> None:
    found, _ = choice({"plain": 1.0, "graphs": 0.5})
    run(found, 2 * EACH)
    found.times[True][-1] = 100.0

    run(found, 1)

    assert found.chosen and found.graphs is not None


def test_without_memory_for_graphs_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    found, ran = choice({"plain": 1.0, "graphs": 0.5}, fails=True)

    with caplog.at_level(logging.INFO, "piper"):
        run(found, STEPS)

    assert ran == ["plain"] * STEPS
    assert caplog.messages == ["device 0: no CUDA graphs, which do not fit"]


def test_graphs_leave_as_much_memory_as_they_take(caplog: pytest.LogCaptureFixture) -> None:
    found, ran = choice({"plain": 1.0, "graphs": 0.5}, free=(10, 4))

    with caplog.at_level(logging.INFO, "piper"):
        run(found, STEPS)

    assert ran == ["plain"] * STEPS and found.graphs is None
    assert caplog.messages == ["device 0: no CUDA graphs, which would leave too little memory"]


def test_the_log_says_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = choice({"plain": 0.2, "graphs": 0.1})

    with caplog.at_level(logging.INFO, "piper"):
        run(found, STEPS)

    assert caplog.messages == [
        "device 0: a step takes 100.0 ms and 1.00 GiB with CUDA graphs, 200.0 ms and 1.00 GiB "
        "without; it runs with them"
    ]


def trained(name: str, options: dict[str, Any], steps: int, optimizer: Any = ADAMW) -> Rehearsal:
    stages = 4 if name == "dualpipev" else 2
    strategy = BUILDERS[name](pp=2, microbatches=4, **options)
    model, loss_fn, data, captured = llama(stages)
    count = ROWS * 4 * options.get("dp", 1)
    batches = [(rows, rows.flip(0)) for rows in (data[k % 3, :count] for k in range(steps))]
    with using(captured):
        return rehearse(model, loss_fn, strategy, batches, optimizer=optimizer)


def with_choices(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[GraphChoice], float]) -> list:
    """Every program of a rehearsal chooses from now on, by these times."""
    made: list[GraphChoice] = []
    load = rehearsal.load

    def loading(job: Job, mine: Assignment, *given: Any) -> Program:
        program = load(job, mine, *given)
        record = partial(record_graphs, program, mine.known, OperatorTape)
        clock, free = (lambda: 0.0), (lambda: 0)
        program.faster = found = GraphChoice(program, None, record, clock, free, lambda: 1)
        found.clock = lambda: seconds(found)
        made.append(found)
        return program

    monkeypatch.setattr(rehearsal, "load", loading)
    monkeypatch.setattr(rehearsal, "join_runs", lambda program, _: program.faster)
    return made


CASES = [("1f1b", {}), ("zb-h1", {"dp": 2, "zero": 3}), ("dualpipev", {"dp": 2, "zero": 2})]


@pytest.mark.parametrize("faster", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("name", "options"), every(3, CASES))
def test_a_run_that_changes_over_trains_like_the_plan(
    name: str, options: dict[str, Any], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_choice, "TIMED", 1)
    plain = trained(name, options, steps=6)
    ticks = iter(range(10**6))

    def seconds(found: GraphChoice) -> float:
        return next(ticks) * (1.0 if (found.graphs is None) == faster else 1e-6)

    made = with_choices(monkeypatch, seconds)

    found = trained(name, options, steps=6)

    assert all(one.chosen and (one.graphs is not None) == faster for one in made)
    assert found.parts == plain.parts
    for parameter, value in plain.parameters.items():
        assert torch.equal(found.parameters[parameter], value), parameter


class Keeping(torch.optim.SGD):
    """Keeps the gradients that it is given."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad


def test_with_an_optimizer_that_keeps_gradients_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_choice, "TIMED", 1)
    made = with_choices(monkeypatch, lambda _: 0.0)

    with caplog.at_level(logging.INFO, "piper"):
        trained("1f1b", {}, steps=4, optimizer=partial(Keeping, lr=0.1))

    assert all(one.keeps and one.chosen and one.graphs is None for one in made)
    assert any("the optimizer keeps the gradients" in text for text in caplog.messages)


def test_offloaded_values_rule_graphs_out() -> None:
    model = chain(2)
    plain, offloaded = (
        compile_strategy(model, BUILDERS["1f1b"](pp=2, microbatches=4, **options).directives)
        for options in ({}, {"offload": "optimizer"})
    )

    assert all(map(is_suited, plain.plans))
    assert not all(map(is_suited, offloaded.plans))


def test_it_is_the_default() -> None:
    assert Options().graphs == "auto"


def test_another_word_is_an_error() -> None:
    with pytest.raises(InputError) as refused:
        Options(graphs="always")  # type: ignore[arg-type]

    assert str(refused.value) == (
        "graphs: there is no 'always'\n  fix: write True, False or \"auto\""
    )


def test_with_on_nan_auto_means_no_graphs() -> None:
    assert Options(graphs="auto", on_nan="stop").graphs == "auto"


def test_state_that_does_not_fit_twice_rules_graphs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved(torch.OutOfMemoryError("no memory"), monkeypatch).without


def test_state_that_cannot_move_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "piper"):
        found = moved(RuntimeError("no pools"), monkeypatch)

    assert found.chosen and not found.without
    assert "optimizer state stays where it is: no pools" in caplog.text


def moved(error: Exception, monkeypatch: pytest.MonkeyPatch) -> GraphChoice:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(graph_choice, "separate_state", fail)
    found, _ = choice({"plain": 2.0, "graphs": 1.0})
    run(found, STEPS)
    return found
