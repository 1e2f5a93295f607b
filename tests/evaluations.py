"""Train with threads as devices, then evaluate and predict with what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import piper
from piper.capture import Captured, capture
from piper.capture.trace.arguments.outputs import separated
from piper.job.batch.batch import Batch
from piper.job.compile.assignment import assignments
from piper.job.job import Job
from piper.job.programs.evaluation import in_eval_mode, rows_of
from piper.job.programs.forward_programs import ForwardPrograms, Wanted, dimensions_of
from piper.job.programs.programs import Programs, load
from piper.job.programs.rehearsal import remember, step_inputs
from piper.names import Phase
from piper.plan.instructions import Plan
from piper.runtime.comm.gloo import Comm
from piper.runtime.execute import Program
from piper.runtime.forward_program import OutputProgram
from piper.runtime.state.device_state import DeviceState, assembled
from piper.runtime.state.shared_state import shared_state
from piper.runtime.thread_devices import run_together
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1)
CAPTURES: dict[Any, Captured] = {}  # of forwards: strategies share them


class Threads:
    """A job whose devices are threads. Its state lives between steps and evaluations."""

    def __init__(self, job: Job, batches: Sequence[Batch]) -> None:
        self.job, self.batches = job, batches
        self.captured, self.compiled = job.compile(batches[0].part(0, job.replicas), by_role=True)
        self.plans = self.compiled.device_plans
        self.states = {plan.device: DeviceState(job.device) for plan in self.plans}
        self.forwards = ForwardPrograms(Programs(job, 0, 2))

    def train(self) -> dict[str, torch.Tensor]:
        """The parameters afterwards."""
        parts = {one.plan.device: one for one in assignments(self.captured, self.compiled)}

        def ready(plan: Plan, comm: Comm) -> Program:
            state = self.states[plan.device]
            return load(self.job, parts[plan.device], self.captured.kernels, state, comm)

        steps = [step_inputs(self.job, self.captured, k, one) for k, one in enumerate(self.batches)]
        seen: list[list[Any]] = [[] for _ in steps]
        mine = [[s[self.job.feeds.feed(plan.device)] for s in steps] for plan in self.plans]
        run_together(self.plans, ready, mine, lambda k, program: remember(seen, k, program))
        owned = [self.states[device].parts(one.reported_states) for device, one in parts.items()]
        return assembled(part for found in owned for part in found)

    def forward(self, batch: Batch, wanted: Wanted) -> Any:
        """The loss of a batch of all replicas, or the output of the model."""
        with (
            in_eval_mode(self.job.model),
            patch("piper.job.programs.forward_programs.capture", cached),
        ):
            return self.run_forward(batch, wanted)

    def run_forward(self, batch: Batch, wanted: Wanted) -> Any:
        replica = batch.part(0, self.job.replicas)
        job = self.forwards.job_for(replica)
        captured, compiled = self.forwards.compile(job, replica, wanted)
        parts = {one.plan.device: one for one in assignments(captured, compiled)}

        def ready(plan: Plan, comm: Comm) -> Program:
            mine = parts[plan.device]
            trainable = mine.part.trainable.__getitem__
            state = shared_state(
                self.states[plan.device], plan.states, mine.part.contents, trainable, job.initial
            )
            kernel = lambda region, phase: captured.kernels.get(  # noqa: E731
                mine.part.regions[region], Phase(phase), False
            )
            kind = Program if wanted == "loss" else OutputProgram
            return kind(mine.plan, kernel, state, comm)

        outputs: dict[int, torch.Tensor] = {}
        totals: list[float] = []

        def after(_: int, program: Program) -> None:
            totals.append(program.totals[0].item())
            outputs.update((program.batch.first + k, one) for k, one in program.losses.items())

        factor = 1 / job.all_microbatches
        pieces = batch.parts(job.replicas)
        feeds = [job.feeds.feed(plan.device) for plan in compiled.device_plans]
        given = [[job.inputs(pieces[feed], [factor] * job.microbatches, 0, feed)] for feed in feeds]
        run_together(compiled.device_plans, ready, given, after)
        if wanted == "loss":
            return totals
        rows = rows_of(replica) // job.microbatches
        found = [outputs[k] for k in sorted(outputs)]
        where = dimensions_of(job, replica, captured)
        return separated({rows: captured.output}, found, [rows] * len(found), where)


def cached(model: Any, loss_fn: Any, example: Any, *rest: Any) -> Captured:
    shapes = Batch.of(example).shapes
    key = id(model), str(loss_fn), shapes, repr(rest)
    if key not in CAPTURES:
        CAPTURES[key] = capture(model, loss_fn, example, *rest)
    return CAPTURES[key]


class Blocks(nn.Module):
    """Residual blocks with batch norm and dropout: they compute otherwise in eval mode."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        made = (nn.BatchNorm1d(6) if norm else nn.LayerNorm(6) for _ in range(4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), one, nn.Tanh(), nn.Dropout(0.0 if norm else 0.3))
            for one in made
        )
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        for block in self.blocks:
            with piper.annotate("L"):
                x = x + block(x)
        if not self.training:
            x = x + self.unused(x)  # has its initial values
        return {"y": x, "best": x.argmax(-1), "mode": "eval"}


def block_loss(output: dict[str, Any], labels: Tensor) -> Tensor:
    return functional.mse_loss(output["y"], labels)


def held_out(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The last batch is smaller, as loaders give it."""
    draw = torch.Generator().manual_seed(3)
    sizes = [*[8] * (count - 1), 6]
    return [
        (torch.randn(n, 6, generator=draw).double(), torch.randn(n, 6, generator=draw).double())
        for n in sizes
    ]


def evaluate_on(_: int) -> Any:
    """Pipeline and data parallelism in real processes: train, evaluate, predict."""
    torch.manual_seed(0)
    model = Blocks().double()
    strategy = one_f_one_b(pp=2, dp=2, microbatches=2, zero=3)
    data = held_out()
    trainer = piper.Trainer(model, block_loss, strategy, example=data[0], optimizer=SGD)
    halves = [tuple(one.chunk(2)[trainer.replica] for one in batch) for batch in data]
    trainer.step(*halves[0])
    found = trainer.evaluate(halves)
    outputs = trainer.predict(halves[1][0])
    labels = trainer.gather({"labels": halves[1][1], "replica": trainer.replica})
    weights = trainer.state_dict()
    trainer.close()
    return found.loss, (found.samples, found.batches), labels, outputs, weights


def evaluate_unequally(rank: int, fewer: int) -> str:
    """One of the replicas has fewer batches."""
    torch.manual_seed(0)
    data, strategy = held_out()[:1] * 3, one_f_one_b(pp=1, dp=2, microbatches=1)
    trainer = piper.Trainer(Blocks().double(), block_loss, strategy, example=data[0])
    try:
        trainer.evaluate(data[: 2 if rank == fewer else 3])
    except piper.errors.InputError as error:
        return str(error)
    return "no error"


def close(found: Any, wanted: Any) -> None:
    """Tensors nearly equal, everything else the same."""
    (some, shape), (others, other) = map(pytree.tree_flatten, (found, wanted))
    assert shape == other
    for one, two in zip(some, others, strict=True):
        if isinstance(two, Tensor):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
        else:
            assert one == two
