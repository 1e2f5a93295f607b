"""Recorded segments train like the plan itself; here a tape of operators stands for CUDA graphs."""

from __future__ import annotations

import copy
import weakref
from functools import cache, partial
from typing import Any

import pytest
import torch
from draws import one_of
from experts import Mixed
from shared_capture import using
from taped import ADAMW, ROWS, OperatorTape, llama

from piper.capture import capture
from piper.errors import RunError
from piper.job.compile.assignment import Assignment
from piper.job.job import Job
from piper.job.programs import rehearsal
from piper.job.programs.rehearsal import Rehearsal, rehearse
from piper.plan.analyse.graph_segments import Hosted, Recorded, segments
from piper.plan.instructions import Load, Recv, Run
from piper.runtime.gpu import cuda_graphs
from piper.runtime.gpu.cuda_graphs import Graphs, put, record_graphs
from piper.strategies import BUILDERS

pytestmark = pytest.mark.usefixtures("old_objects")  # each recording collects garbage


def mixed_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    rows, side = output
    return ((rows - target) ** 2).mean() + side.mean()


@cache
def mixed(stages: int) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model, rows = Mixed(stages, "spread"), torch.randn(3, 16, 3, 6)
    example = (rows[0, :ROWS], rows[0, :ROWS])
    return model, mixed_loss, rows, capture(model, mixed_loss, example)


def trained(made: Any, name: str, options: dict[str, Any], **more: Any) -> Rehearsal:
    """Three steps with microbatches of two rows, on as many rows as the strategy takes."""
    stages = 4 if name == "dualpipev" else 2
    strategy = BUILDERS[name](pp=2, microbatches=4, **options)
    model, loss_fn, data, captured = made(stages)
    count = ROWS * 4 * options.get("dp", 1) * (2 if name == "dualpipe" else 1)
    rows = data.repeat(1, 2, *[1] * (data.dim() - 2))[:, :count]
    batches = [(step, step.flip(0)) for step in rows]
    with using(captured):
        return rehearse(model, loss_fn, strategy, batches, **{"optimizer": ADAMW, **more})


CLIP = 0.1
CASES = [  # the last: with gradients that are clipped, without, or both
    (llama, "1f1b", {}, (CLIP,)),
    (llama, "zb-h1", {}, ()),
    (llama, "gpipe", {"dp": 2, "zero": 0}, ()),
    (llama, "dualpipev", {"dp": 2, "zero": 2}, ()),
    (llama, "1f1b", {"dp": 2, "zero": 3}, ()),
    (llama, "zb-h1", {"dp": 2, "zero": 3, "reduce": "once"}, ()),
    (llama, "dualpipe", {"dp": 2, "zero": 1}, ()),
    (llama, "gpipe", {"offload": ["activations", "optimizer"]}, ()),
    (llama, "zb-h1", {"dp": 2, "zero": 3, "offload": "activations", "remat": True}, ()),
    (mixed, "1f1b", {"dp": 2, "ep": 2}, ()),
    (mixed, "dualpipev", {"dp": 2, "ep": 2, "zero": 1}, (None,)),
]


@one_of(2)
@pytest.mark.parametrize(
    ("made", "name", "options", "max_norm"),
    [
        pytest.param(*case, max_norm, marks=() if max_norm in chosen else pytest.mark.soak)
        for *case, chosen in CASES
        for max_norm in (None, CLIP)
    ],
)
def test_replays_train_like_the_plan(
    made: Any, name: str, options: dict[str, Any], max_norm: float | None, monkeypatch: Any
) -> None:
    plain = trained(made, name, options, max_norm=max_norm)
    seen = with_graphs(monkeypatch)

    graphed = trained(made, name, options, max_norm=max_norm)

    assert len(seen) >= 2 and all(recorded_runs(graphs) for graphs in seen)
    assert graphed.parts == plain.parts
    assert graphed.grad_norms == plain.grad_norms
    for parameter, value in plain.parameters.items():
        assert torch.equal(graphed.parameters[parameter], value), parameter


def with_graphs(monkeypatch: Any) -> list[Graphs]:
    """Every program of a rehearsal is recorded from now on."""
    seen: list[Graphs] = []
    load = rehearsal.load

    def loading(job: Job, mine: Assignment, *given: Any) -> Any:
        program = load(job, mine, *given)
        program.faster = record_graphs(program, mine.known, OperatorTape)
        seen.append(program.faster)
        return program

    monkeypatch.setattr(rehearsal, "load", loading)
    monkeypatch.setattr(rehearsal, "join_runs", lambda program, _: program.faster)
    return seen


def recorded_runs(graphs: Graphs) -> bool:
    """Whether the program ran graphs, and these replay runs."""
    plan = graphs.program.plan
    return graphs.program.faster is graphs and any(
        isinstance(plan.instructions[k], Run) for k, _ in graphs.acts
    )


class ForgetfulTape:
    """Keeps nothing of what it records: memory is free when a CUDA graph's pool could use it."""

    def record(self, do: Any) -> Any:
        do()
        return lambda: None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


@pytest.mark.parametrize(("name", "alive"), [("1f1b", 2), ("gpipe", 4)])
def test_a_message_arrives_where_a_dead_one_was(name: str, alive: int, monkeypatch: Any) -> None:
    """A stage of 1F1B holds what it received until its backward, GPipe's last one of all."""
    received: list[weakref.ref[Any]] = []
    most: dict[int, int] = {}
    load, make = rehearsal.load, cuda_graphs.empty_for

    def noted(recv: Recv, device: torch.device) -> list[torch.Tensor]:
        made = make(recv, device)
        received.append(weakref.ref(made[0].untyped_storage()))
        now = sum(ref() is not None for ref in received)
        most[len(most)] = now
        return made

    def loading(job: Job, mine: Assignment, *given: Any) -> Any:
        program = load(job, mine, *given)
        received.clear()
        record_graphs(program, mine.known, ForgetfulTape)
        return program

    monkeypatch.setattr(rehearsal, "load", loading)
    monkeypatch.setattr(cuda_graphs, "empty_for", noted)
    trained(llama, name, {})

    assert len(most) >= 8 and max(most.values()) == alive, most


def test_rows_that_return_from_experts_are_copied_where_dead_ones_were(monkeypatch: Any) -> None:
    """Each segment that reads such rows has a copy, and only while it runs."""
    load, make = rehearsal.load, cuda_graphs.zeros
    alive: list[int] = []
    wanted: list[int] = []

    def loading(job: Job, mine: Assignment, *given: Any) -> Any:
        program, copies = load(job, mine, *given), list[weakref.ref[Any]]()
        fixed = {one.value for one in program.plan.instructions if isinstance(one, Load)}

        def noted(where: Any, known: Any, name: str) -> Any:
            made = make(where, known, name)
            if name not in fixed:
                copies.append(weakref.ref(made.untyped_storage()))
                alive.append(sum(ref() is not None for ref in copies))
            return made

        with monkeypatch.context() as patch:
            patch.setattr(cuda_graphs, "zeros", noted)
            record_graphs(program, mine.known, ForgetfulTape)
        found = segments(program.plan, lambda run, moving: True)
        wanted.extend(len(one.copied) for one in found if isinstance(one, Recorded))
        return program

    monkeypatch.setattr(rehearsal, "load", loading)
    trained(mixed, "1f1b", {"dp": 2, "ep": 2})

    assert len(alive) == sum(wanted) > 8 and max(alive) == max(wanted)


def test_what_cannot_be_recorded_is_done_by_the_host(monkeypatch: Any) -> None:
    plain = trained(llama, "1f1b", {})
    tries: list[int] = []
    original = OperatorTape.record

    def refusing(self: OperatorTape, do: Any) -> Any:
        tries.append(1)
        if len(tries) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return original(self, do)

    monkeypatch.setattr(OperatorTape, "record", refusing)
    with_graphs(monkeypatch)

    graphed = trained(llama, "1f1b", {})

    assert graphed.parts == plain.parts and len(tries) > 3


def test_a_segment_ends_where_the_host_has_something_to_do(monkeypatch: Any) -> None:
    seen = with_graphs(monkeypatch)
    trained(llama, "1f1b", {})
    plan = seen[1].program.plan

    found = segments(plan, lambda run, moving: True)

    hosted = {one.at for one in found if isinstance(one, Hosted)}
    replayed = [k for one in found if isinstance(one, Recorded) for k in one.at]
    assert {k for k, one in enumerate(plan.instructions) if isinstance(one, Recv)} <= hosted
    assert {k for k, one in enumerate(plan.instructions) if isinstance(one, Run)} <= set(replayed)
    assert len(replayed) == len(set(replayed)) and not hosted & set(replayed)


def test_rows_that_come_to_experts_are_never_recorded(monkeypatch: Any) -> None:
    seen = with_graphs(monkeypatch)
    trained(mixed, "dualpipev", {"dp": 2, "ep": 2, "zero": 1})
    plan = seen[0].program.plan
    runs = {k: one for k, one in enumerate(plan.instructions) if isinstance(one, Run)}

    found = segments(plan, lambda run, moving: True)

    recorded = {k for one in found if isinstance(one, Recorded) for k in one.at if k in runs}
    experts = {k for k, run in runs.items() if "EP" in run.region}
    assert experts and not experts & recorded
    assert recorded == set(runs) - experts


def test_what_has_other_sizes_than_recorded_is_refused() -> None:
    put(torch.ones(2, 3), torch.zeros(2, 3))

    with pytest.raises(ValueError, match="recorded for"):
        put(torch.ones(1, 3), torch.zeros(2, 3))


class Hoarder(torch.optim.SGD):
    """Keeps the gradients it is given, instead of a copy."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad
        super().step(closure)


def test_an_optimizer_that_keeps_gradients_is_refused(monkeypatch: Any) -> None:
    with_graphs(monkeypatch)

    with pytest.raises(RunError, match=r"Hoarder keeps the gradients.*p\.grad\.clone"):
        trained(llama, "1f1b", {}, optimizer=partial(Hoarder, lr=0.1))


def test_a_failed_recording_leaves_nothing_behind(monkeypatch: Any) -> None:
    tries: list[int] = []
    original = OperatorTape.record

    def refusing(self: OperatorTape, do: Any) -> Any:
        tries.append(1)
        if len(tries) == 3:
            raise RuntimeError("no")
        return original(self, do)

    monkeypatch.setattr(OperatorTape, "record", refusing)
    seen = with_graphs(monkeypatch)
    run = "piper.job.programs.rehearsal.run_together"
    monkeypatch.setattr(run, lambda *given: given[1:2] and loaded(given))

    def loaded(given: Any) -> None:
        plans, load = given[:2]
        load(plans[0], None)

    with pytest.raises(IndexError):  # nothing was trained
        trained(llama, "1f1b", {})

    program = seen[0].program
    states = {program.slot(state.value) for state in program.plan.states}
    assert len(tries) > 3
    assert all(k in states or slot is None for k, slot in enumerate(program.slots))


@pytest.mark.soak
def test_replays_train_as_plain_pytorch(monkeypatch: Any) -> None:
    """One process, plain autograd: the losses of every microbatch, norms and parameters."""
    seen = with_graphs(monkeypatch)

    found = trained(llama, "dualpipev", {"dp": 2, "zero": 2})

    model, loss_fn, data, _ = llama(4)
    model = copy.deepcopy(model)
    optimizer, norms, losses = ADAMW(model.parameters()), [], []
    for step in data:
        parts = zip(step.chunk(8), step.flip(0).chunk(8), strict=True)
        each = [loss_fn(model(tokens), labels) for tokens, labels in parts]
        torch.stack(each).mean().backward()
        grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack(grads).norm().item())
        losses.append({part: loss.item() for part, loss in enumerate(each)})
        optimizer.step()
        optimizer.zero_grad()
    assert all(recorded_runs(graphs) for graphs in seen)
    for step in range(3):
        assert dict(found.parts[step]) == pytest.approx(losses[step], rel=1e-7)
    assert found.grad_norms == pytest.approx(norms, rel=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=0, atol=1e-9)
