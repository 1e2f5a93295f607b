"""Kernels run on zeros of the right shapes: pipelines, halves, replicas, tied weights, experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from draws import one_of
from experts import Mixed
from memory_meter import Meter
from shared_capture import using
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper.capture import capture
from piper.capture.kernels.callables import Kernels
from piper.ir.values import Role
from piper.job.batch.batch import Batch
from piper.job.compile.assignment import assignments
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.programs import load
from piper.job.programs.rehearsal import rehearsed
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.plan.instructions import Run
from piper.runtime.comm.threads import Hub, ThreadComm
from piper.runtime.gpu.warmup import warm
from piper.runtime.state.device_state import DeviceState
from piper.strategies import BUILDERS


def mixed_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    rows, side = output
    return ((rows - target) ** 2).mean() + side.mean()


@cache
def in_four_stages() -> tuple[Any, ...]:
    config = LlamaConfig(vocab=32, dim=16, heads=2, layers=4, tied=True)
    tokens, model = torch.randint(32, (4, 6)), Llama(config, stages=4)
    found = capture(model, cross_entropy, (tokens[:1], tokens[:1]))
    return model, cross_entropy, (tokens, tokens), found


@cache
def mixed() -> tuple[Any, ...]:
    rows, model = torch.randn(4, 3, 6), Mixed(2, "spread")
    return model, mixed_loss, (rows, rows), capture(model, mixed_loss, (rows[:1], rows[:1]))


@one_of(2)
@pytest.mark.parametrize(
    ("made", "name", "options"),
    [
        pytest.param(in_four_stages, "zbv", {}, marks=pytest.mark.soak),
        (in_four_stages, "interleaved-1f1b", {"dp": 2, "zero": 3}),
        (mixed, "1f1b", {"dp": 2, "ep": 2}),
    ],
)
def test_every_kernel_of_a_plan_runs(made: Any, name: str, options: dict[str, Any]) -> None:
    model, loss_fn, example, known = made()
    strategy = BUILDERS[name](pp=2, microbatches=4, **options)
    job = Job(model, loss_fn, strategy, Options(device="cpu"))
    with using(known):
        captured, compiled = job.compile(Batch.of(example))
    for mine in list(assignments(captured, compiled))[:2]:
        ran, plan = [], mine.plan
        comm = ThreadComm(Hub(len(compiled.plans)), plan.device)
        program = load(job, mine, captured.kernels, DeviceState(), comm)
        kernels = program.kernels
        program.kernels = lambda region, phase, k=kernels, r=ran: seen(k(region, phase), r, phase)

        warm(program, mine.known, mine.part.experts)

        assert {one.phase for one in plan.instructions if isinstance(one, Run)} == set(ran)


def test_it_takes_less_memory_than_a_step() -> None:
    """Else it would decide how long a sequence may be."""
    model, loss_fn, example, known = in_four_stages()
    strategy = BUILDERS["gpipe"](pp=1, microbatches=4)
    job = Job(model, loss_fn, strategy, Options(device="cpu"))
    with using(known):
        captured, compiled = job.compile(Batch.of(example))
        (mine,) = assignments(captured, compiled)
        comm = ThreadComm(Hub(1), mine.plan.device)
        program = load(job, mine, captured.kernels, DeviceState(), comm)
        with Meter() as warmed:
            warm(program, mine.known)

    saved = {name: v.nbytes for name, v in compiled.dag.values.items() if v.role is Role.SAVED}
    assert warmed.live == 0
    assert warmed.peak < sum(size for name, size in saved.items() if name.endswith("@0"))


def seen(kernel: Any, ran: list[str], phase: str) -> Any:
    def run(*inputs: Any) -> Any:
        ran.append(phase)
        return kernel(*inputs)

    return run


class Layouts(TorchDispatchMode):
    """Which operators are called, and the sizes and strides of what they read."""

    def __init__(self, found: set[Any]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.found.add((str(func), *((tuple(t.shape), t.stride()) for t in tensors)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """Of every kernel that is called."""
    found: set[Any] = set()
    get = Kernels.get

    def watched(self: Kernels, region: Any, phase: Any, compiled: bool) -> Any:
        kernel = get(self, region, phase, compiled)

        def call(*reads: Any) -> Any:
            with Layouts(found):
                return kernel(*reads)

        return call

    monkeypatch.setattr(Kernels, "get", watched)
    yield found


KEPT = {False: "dualpipev", True: None, "attention": "dualpipev", "matmuls": None, 0.5: None}


@one_of(2)
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        pytest.param(name, keep, marks=() if name == usual else pytest.mark.soak)
        for name in ("dualpipev", "zbv", "interleaved-1f1b")
        for keep, usual in KEPT.items()
    ],
)
def test_operators_see_the_layouts_of_a_step(name: str, remat: Any, layouts: set[Any]) -> None:
    """Some operators remember how to compute what they met first, whatever they are given later."""
    model, loss_fn, example, known = in_four_stages()
    strategy = BUILDERS[name](pp=2, microbatches=4, remat=remat)
    job = Job(model, loss_fn, strategy, Options(device="cpu"))
    with using(known):
        captured, compiled = job.compile(Batch.of(example))
        for mine in assignments(captured, compiled):
            comm = ThreadComm(Hub(len(compiled.plans)), mine.plan.device)
            warm(load(job, mine, captured.kernels, DeviceState(), comm), mine.known)
        warmed = set(layouts)
        layouts.clear()
        rehearsed(job, [Batch.of(example)])

    assert warmed
    assert warmed <= layouts
