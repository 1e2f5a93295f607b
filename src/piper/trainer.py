"""Compile a strategy for a model, and train: the public face of everything below."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from piper.capture import Captured, capture
from piper.capture.kernels.callables import Kernels
from piper.directives import Place, Strategy
from piper.directives.strategy import as_strategy
from piper.ir.costs import Costs
from piper.ir.replicas import replicas
from piper.job import arguments, consistency
from piper.job.assignment import Assignment, assignment
from piper.job.compiler import Compiled, compile_strategy
from piper.job.inspection import Inspected, is_inspecting, looks_at_roles, plans_text, regions_text
from piper.job.loss_reduction import refuse_no_mean
from piper.job.shipping import Sending
from piper.job.tracing import from_environment, recording
from piper.job.tuning import by_code, costs_of, read_costs
from piper.names import Phase
from piper.runtime.batch import (
    Batch,
    microbatch,
    reduction_of,
    refuse_ignored,
    refuse_uneven,
    refuse_weightless,
    shape_key,
    shares,
    tensors_of,
    tokens_in,
    weighed,
)
from piper.runtime.comm.gloo import Comm, ProcessComm
from piper.runtime.comm.transport import communicators
from piper.runtime.comm.world import gather, join, refuse_wrong_world, world
from piper.runtime.execute import Kernel, Program
from piper.runtime.gpu.cuda_graphs import record_graphs
from piper.runtime.gpu.stream_shares import on_compute_stream
from piper.runtime.gpu.warmup import warm
from piper.runtime.hardware import chosen_device
from piper.runtime.metrics import Metrics
from piper.runtime.observe.measure import measure, together
from piper.runtime.state import checkpoint
from piper.runtime.state.device_state import DeviceState, assembled
from piper.runtime.state.initial_values import initial_values
from piper.runtime.state.optimizers import MakeOptimizer, MakeScheduler
from piper.runtime.steps_in_flight import steps_on

Loss = Callable[..., torch.Tensor]
LOG = logging.getLogger("piper")
ADAMW = partial(torch.optim.AdamW, lr=3e-4)


class Trainer:
    """Trains a model under a strategy; the same script runs on every device.

    `example` is one whole batch of a replica, as `step` gets it; every process gives the batch of
    its replica (`trainer.replica` of `trainer.replicas`). The loss is
    `loss_fn(model(*batch[:-1]), batch[-1])`, or `model(*batch)` when `loss_fn` is None. It is a
    "mean" over the batch unless `reduction="sum"` (say which if `loss_fn` is None). If microbatches
    weigh differently (ignored tokens), give `loss_weight(*microbatch)`, the number of tokens that
    count; with `reduction="sum"`, the loss is then the sum divided by the total weight.

    `optimizer` is called with the named parameters of each bucket, `lr_scheduler` with each such
    optimizer (what it makes is stepped after every step); `max_norm` clips by the norm over all
    devices; `compiled` runs the regions through Inductor, `graphs` as CUDA graphs where their
    shapes allow (both may be on; graphs need a GPU); `init(name, tensor)` fills parameters of a
    model on `meta`; `seed` is for dropout and such models. `device` is "cuda" or "cpu", by default
    a GPU where there is one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Loss | None,
        strategy: Strategy | Sequence[Any] | None = None,
        *,
        example: tuple[Any, ...],
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        arguments.refuse_unknown(options, self.configure)
        arguments.refuse_example(example)
        self.configure(model, loss_fn, strategy, **options)
        if is_inspecting():
            raise Inspected(self, example, *self.compile(example))
        self.rank = join(timeout, self.device.type == "cuda")
        self.state = DeviceState(self.device)
        self.comm: ProcessComm | None = None
        self.programs: dict[Any, Program] = {}
        self.made: dict[Any, Compiled] = {}  # on device 0, for the file of a recording
        self.recording = from_environment()
        self.assigned: dict[Any, Assignment] = {}  # what this device is to do
        self.sending = Sending(self.compiled)
        self.stepped: set[Any] = set()  # kinds of batches that were met
        self.broken = False
        self.program(example)
        self.arguments = len(example)
        self.taken = consistency.digests(model)  # of what it has a copy of now

    def configure(
        self,
        model: torch.nn.Module,
        loss_fn: Loss | None,
        strategy: Strategy | Sequence[Any] | None = None,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
        lr_scheduler: MakeScheduler | None = None,
        reduction: str | None = None,
        loss_weight: Callable[..., Any] | None = None,
        max_norm: float | None = None,
        compiled: bool = False,
        graphs: bool = False,
        seed: int = 0,
        init: Callable[[str, torch.Tensor], None] | None = None,
        captured: Captured | None = None,
        costs: Costs | str | Path | None = None,
        device: str | None = None,
    ) -> None:
        """What to do, before any other process is involved."""
        arguments.refuse_wrong_kinds(model, loss_fn, optimizer, lr_scheduler, max_norm)
        self.device = chosen_device(device)
        self.pace = steps_on(self.device)
        self.model, self.loss_fn = model, loss_fn
        self.strategy = as_strategy(strategy)
        self.loss_weight, self.max_norm = loss_weight, max_norm
        self.compiled, self.seed, self.graphs = compiled, seed, graphs
        self.make_optimizer: MakeOptimizer = optimizer
        self.lr_scheduler, self.steps = lr_scheduler, 0
        self.initial = initial_values(model, seed, init)
        places = [d.devices for d in self.strategy if isinstance(d, Place)]
        self.feeds = replicas(places)
        self.reduction = reduction_of(reduction, loss_fn, loss_weight, self.parts * self.replicas)
        self.costs = read_costs(costs)
        self.known: dict[Any, Captured] = {}
        self.arguments = 0  # of the example, once it is known
        self.captured = captured  # what `capture` found before, for microbatches of this shape

    @property
    def replica(self) -> int:
        """Which part of the data this process must load."""
        return self.feeds.feed(self.rank)

    @property
    def replicas(self) -> int:
        """In how many parts the data is divided.

        Replicas that share devices (as in DualPipe) share a batch: they count as one here.
        """
        return len(self.feeds.feeds)

    @property
    def parts(self) -> int:
        """In how many microbatches the batch of a process is cut."""
        return self.strategy.microbatches * len(self.feeds.feeds[0])

    def step(self, *batch: Any) -> Metrics:
        """One optimizer step on one batch."""
        self.refuse_closed()
        own = self.own_weights(batch)
        self.pace.begin()
        everyone = self.agreed(batch, own)
        program = self.program(batch)
        self.ignored = program.ignored
        work = self.batch(batch, self.steps, self.replica, own, everyone)
        try:
            with on_compute_stream(program.plan, self.device):
                recorded = self.recording.step(self.steps + 1, program, work)
        except BaseException:
            self.pace.forget()
            self.broken = world() > 1
            raise
        self.state.advance()
        self.steps, self.taken = self.steps + 1, {}
        tokens = self.replicas * tokens_in(work.inputs)
        metrics = Metrics(self.steps, tokens, self.pace.end(program))
        self.recording.keep(self.steps, recorded, self.made.get(self.key(batch)))
        return metrics

    def record(self, path: str | Path, steps: int = 3, profile: bool = False) -> None:
        """Record the next steps in a file for `piper view` and Perfetto. Every process calls it.

        Device 0 writes the file after the last of them, or in `close`. With `profile`, every device
        writes what torch's profiler sees of its instructions beside it.
        """
        self.enter("record")
        self.recording.finish()
        self.recording = recording(path, self.steps + 1, steps, profile)

    def tune(self, *batch: Any, rounds: int = 2) -> Costs:
        """Measure what everything takes, and order overlapping work by it from now on.

        Every process must call it. Parameters and optimizers stay as they are. `costs.to_json()`
        is for a file that `Trainer(costs=...)` reads next time.
        """
        self.enter("tune")
        own = self.own_weights(batch)
        work = self.batch(batch, self.steps, self.replica, own, self.agreed(batch, own))
        program = self.program(batch)
        with on_compute_stream(program.plan, self.device):
            seen = measure(program, work, rounds)
        seen.compute = by_code(seen.compute, self.assigned[self.key(batch)].codes)
        self.costs = costs_of(together(seen))
        self.programs = {}
        self.program(batch)
        return self.costs

    def batch(
        self, batch: tuple[Any, ...], step: int, feed: int, own: Sequence[float], everyone: float
    ) -> Batch:
        """A batch as programs take it; dropout is seeded by the step."""
        inputs = tuple(map(self.pace.moved, tensors_of(batch)))
        if self.parts * self.replicas > 1 and self.reduction == "mean" and not self.loss_weight:
            refuse_ignored(tensors_of(batch), self.ignored)
        seed = self.seed * 1_000_003 + step
        weights = shares(own, everyone, self.reduction, self.loss_weight is not None)
        return Batch(inputs, weights, seed, self.max_norm, feed * self.parts)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole model's parameters and buffers on device 0, for `model.load_state_dict`.

        Every process must call it; the others get None.
        """
        consistency.agree_on_call("state_dict", self.replicas)
        self.taken = {}  # from now on the model may have these, to evaluate
        everywhere = gather(self.state.parts(self.spoken))
        if everywhere is None:
            return None
        found = assembled(part for parts in everywhere for part in parts)
        return self.state.whole(found, self.model.state_dict(), self.aliases)

    @property
    def spoken(self) -> set[str]:
        """States that this device gives, where several hold the same."""
        return {name for one in self.assigned.values() for name in one.spoken}

    def save(self, folder: str | Path) -> None:
        """Write all that `resume` needs to go on from here. Every process calls it.

        An older checkpoint in the folder stays until this one is whole. All processes must see the
        same folder.
        """
        self.enter("save")
        model = checkpoint.described(self.model)
        checkpoint.save(Path(folder), self.state, self.spoken, model, self.steps)

    def resume(self, folder: str | Path, missing_ok: bool = False) -> int:
        """Go on from what `save` wrote, under this or any other strategy; the steps done so far.

        Every process calls it, before the first step. `missing_ok`: nothing there is a beginning.
        """
        self.enter("resume")
        model = checkpoint.described(self.model)
        self.steps = checkpoint.resume(Path(folder), self.state, model, self.steps, missing_ok)
        return self.steps

    def close(self) -> None:
        """Give back the communicators; the process may go on with another Trainer."""
        self.recording.finish()
        self.pace.finish()
        if self.comm is not None:
            self.comm.close()
            self.comm = None

    def enter(self, call: str) -> None:
        """Of what all processes must do together; a step has its own way."""
        self.refuse_closed()
        consistency.agree_on_call(call, self.replicas)

    def refuse_closed(self) -> None:
        consistency.refuse_over(self.comm is None, self.broken)

    def own_weights(self, batch: tuple[Any, ...]) -> list[float]:
        """What the user says that each microbatch of this batch weighs."""
        return weighed(self.loss_weight, self.reduction, batch, self.parts)

    def try_mean(self, batch: tuple[Any, ...], captured: Captured | None) -> None:
        """On the process that captured the model."""
        several = self.parts * self.replicas > 1
        if captured and several and self.reduction == "mean" and not self.loss_weight:
            refuse_no_mean(self.loss_fn, captured.output, batch, self.parts, captured.ignored)

    def agreed(self, batch: tuple[Any, ...], own: Sequence[float]) -> float:
        """The weight of the batches of all replicas; refused if processes do different things."""
        everyone, key = sum(own) * self.replicas, self.key(batch)
        consistency.refuse_too_late(self.taken, self.model)
        if not self.stepped:
            self.try_mean(batch, self.known.get(key))  # of real data: an example may be zeros
        if world() > 1:
            data = tensors_of(batch)
            if key in self.stepped and any(one.is_cuda for one in data):
                data = ()  # to look at them would be to wait for the GPU
            everyone = consistency.agree_on_step(key, data, self.replica, self.replicas, sum(own))
        self.stepped.add(key)
        refuse_weightless(everyone)
        return everyone

    def program(self, batch: tuple[Any, ...]) -> Program:
        """The program for batches of this shape; compiled at the first of its kind."""
        key = self.key(batch)
        if key not in self.programs:
            self.programs[key] = self.build(batch)
        return self.programs[key]

    def key(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a program is compiled for."""
        return shape_key(batch), consistency.flags(self.model)

    def compile(self, batch: tuple[Any, ...]) -> tuple[Captured, Compiled]:
        """Capture the model for this shape of batch, and apply the strategy."""
        parts = self.parts
        refuse_uneven(batch, parts)
        started = time.perf_counter()
        known = self.known.get(self.key(batch)) or self.captured
        one, kind = microbatch(batch, 0, parts), self.device.type
        make = partial(capture, self.model, self.loss_fn, one, kind)
        captured = known or arguments.told_of_arguments(make, one, self.arguments or len(one))
        self.known[self.key(batch)] = captured
        self.captured, self.ignored, self.aliases = None, captured.ignored, captured.aliases
        LOG.info("captured %s in %.1f s", regions_text(captured), time.perf_counter() - started)
        clip, started = self.max_norm is not None, time.perf_counter()
        self.try_mean(batch, captured)
        many = looks_at_roles(self.feeds.devices)
        compiled = compile_strategy(
            captured.model, self.strategy.directives, clip=clip, costs=self.costs, by_role=many
        )
        for region, cut in compiled.dag.shardings.items():
            captured.experts.prove(captured.model.by_id[region].code, cut.ways)
        LOG.info("compiled %s in %.1f s", plans_text(compiled), time.perf_counter() - started)
        return captured, compiled

    def build(self, batch: tuple[Any, ...]) -> Program:
        """What this device does; compiled by the first one, for all."""
        if self.comm is None:
            consistency.refuse_disagreement(self.given(batch), self.model)
        mine, kernels = self.assign(batch)
        self.assigned[self.key(batch)], self.ignored = mine, mine.ignored
        if self.comm is None:
            self.comm = communicators(self.device)
        self.comm.extend(mine.needs)
        program = self.load(mine, kernels, self.state, self.comm)
        if self.device.type == "cuda":
            self.prepare(program, mine)
        return program

    def prepare(self, program: Program, mine: Assignment) -> None:
        """Before anything is on its way: run every kernel once, and record graphs."""
        with on_compute_stream(program.plan, self.device):
            warm(program, mine.known, mine.experts)
            if self.graphs:
                program.graphs = record_graphs(program, mine.known)

    def assign(self, batch: tuple[Any, ...]) -> tuple[Assignment, Kernels]:
        if self.rank:
            return self.sending.other()

        def make() -> tuple[Captured, Compiled]:
            captured, compiled = self.compile(batch)
            refuse_wrong_world(compiled.dag.devices)
            self.made[self.key(batch)] = compiled
            return captured, compiled

        if world() > 1:
            LOG.info("compiling on device 0, for all %d", world())
            return self.sending.first(make)
        captured, compiled = make()
        return assignment(captured, compiled, 0), captured.kernels

    def load(self, mine: Assignment, kernels: Kernels, state: DeviceState, comm: Comm) -> Program:
        """Make a plan ready: its parameters, its kernels, its way to the others."""
        trainable = mine.trainable.__getitem__
        state.add(mine.plan.states, mine.contents, trainable, self.initial, self.make_optimizer)
        if self.lr_scheduler is not None:
            state.schedule(self.lr_scheduler, self.steps)

        def kernel(region: str, phase: str) -> Kernel:
            return kernels.of(mine.recipes[region, phase], Phase(phase), self.compiled)

        loss = getattr(torch, mine.loss)
        return Program(mine.plan, kernel, state, comm, loss, ignored=mine.ignored)

    def given(self, batch: tuple[Any, ...]) -> dict[str, str]:
        """What all processes must have been given alike."""
        names = ("reduction", "max_norm", "compiled", "graphs", "seed")
        return {
            "strategy": str(self.strategy),
            "example": repr(shape_key(batch)),
            "model": f"{consistency.structure(self.model)} {consistency.flags(self.model)}",
            "device": self.device.type,
            **{name: repr(getattr(self, name)) for name in names},
        }
