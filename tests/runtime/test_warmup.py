"""Kernels run on zeros of the right shapes: pipelines, halves, replicas, tied weights, experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from experts import Mixed
from shared_capture import using

from piper.capture import capture
from piper.job.assignment import assignments
from piper.job.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs import load
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.plan.instructions import Run
from piper.runtime.comm.threads import Hub, ThreadComm
from piper.runtime.gpu.warmup import warm
from piper.runtime.state.device_state import DeviceState
from piper.strategies import BUILDERS

LLAMA = LlamaConfig(vocab=32, dim=16, heads=2, layers=2, tied=True)


def mixed_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    rows, side = output
    return ((rows - target) ** 2).mean() + side.mean()


@cache
def llama() -> tuple[Any, ...]:
    tokens, model = torch.randint(32, (4, 6)), Llama(LLAMA, stages=2)
    found = capture(model, cross_entropy, (tokens[:1], tokens[:1]))
    return model, cross_entropy, (tokens, tokens), found


@cache
def mixed() -> tuple[Any, ...]:
    rows, model = torch.randn(4, 3, 6), Mixed(2, "spread")
    return model, mixed_loss, (rows, rows), capture(model, mixed_loss, (rows[:1], rows[:1]))


@pytest.mark.parametrize(
    ("made", "name", "options"),
    [
        (llama, "zb-h1", {}),
        (llama, "1f1b", {"dp": 2, "zero": 3}),
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


def seen(kernel: Any, ran: list[str], phase: str) -> Any:
    def run(*inputs: Any) -> Any:
        ran.append(phase)
        return kernel(*inputs)

    return run
