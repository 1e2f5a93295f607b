"""The programs of this process: one for each kind of batch, with shared state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from piper.capture import Captured, Precision, described
from piper.capture.kernels.callables import Kernels
from piper.capture.kernels.joining import reached
from piper.costs import Costs
from piper.directives import Strategy
from piper.errors import CaptureError
from piper.garbage import collector_off
from piper.job.arguments import counting_arguments
from piper.job.batch.batch import Batch
from piper.job.compile.assignment import Assignment, assignment
from piper.job.compile.compiler import Compiled
from piper.job.compile.replica_sizes import with_fixed_buffers
from piper.job.compile.shipping import PlanShipping
from piper.job.job import BatchKind, Job
from piper.job.loop.recent import recent
from piper.job.loss.loss_reduction import LossReduction
from piper.job.memory.memory_errors import memory_explained
from piper.job.memory.zero_choice import holds_freely
from piper.job.processes import consistency
from piper.job.processes.different_lengths import alike
from piper.job.programs.forward_check import ForwardCheck
from piper.job.programs.new_program import new_program_lines
from piper.names import Device, F, Phase
from piper.plan.analyse import kernel_sequences
from piper.plan.analyse.kernel_sequences import KernelSequence
from piper.plan.instructions import Run
from piper.runtime.comm.gloo import Comm, ProcessComm
from piper.runtime.comm.stream_shares import on_compute_stream
from piper.runtime.comm.transport import communicators
from piper.runtime.execute import Kernel, Program
from piper.runtime.gpu.cuda_graphs import Graphs, record_graphs
from piper.runtime.gpu.graph_choice import (
    GraphChoice,
    device_clock,
    empty_cache,
    free_memory,
    is_suited,
    reserved_memory,
)
from piper.runtime.gpu.warmup import warm
from piper.runtime.joined_runs import Joins, join_runs
from piper.runtime.optimizers.kept_optimizers import as_given
from piper.runtime.optimizers.own_parameters import with_attributes
from piper.runtime.own_state_dict import state_dict_of
from piper.runtime.processes.gathering import gather
from piper.runtime.processes.world import refuse_wrong_world, world
from piper.runtime.state.averages import start_late
from piper.runtime.state.constants import keep_constant
from piper.runtime.state.device_state import DeviceState, assembled
from piper.runtime.state.loss_scale import DynamicLossScale
from piper.runtime.state.running_statistics import take_from_first

LOG = logging.getLogger("piper")


@dataclass
class Programs:
    """The programs of this device. The first process compiles for all."""

    job: Job
    rank: int
    arguments: int  # of the example
    costs: Costs | None = None  # measured by `tune`
    agreed: bool = False  # whether all processes are known to have the same job
    ready: dict[BatchKind, Program] = field(default_factory=dict)
    assigned: dict[BatchKind, Assignment] = field(default_factory=dict)  # this device's part
    made: dict[BatchKind, Compiled] = field(default_factory=dict)  # on device 0
    aliases: dict[str, str] = field(default_factory=dict)  # of parameters, on device 0
    turns: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # of each state: which of the devices that hold it this one is, of how many
    statistics: dict[str, Device] = field(
        default_factory=dict
    )  # buffers that forwards of several replicas update: where the first of these is
    alike: set[Hashable] = field(default_factory=set)  # kinds that replicas may have in one step
    fixed: bool = False  # whether parameters are gathered at the same points for all lengths
    comm: ProcessComm | None = None  # None before the first program and after `close`
    check: ForwardCheck = field(default_factory=ForwardCheck)  # of forwards, on device 0

    def __post_init__(self) -> None:
        self.state = DeviceState(self.job.device)
        self.shipping = PlanShipping(self.job.options.compiled)

    @property
    def role(self) -> int:
        """The first device with the same plan as this one, but for whom it meets."""
        return next((one.part.role.plan.device for one in self.assigned.values()), self.rank)

    def has(self, kind: BatchKind) -> bool:
        return kind in self.ready

    def get(self, batch: Batch, kind: BatchKind, steps: int) -> Program:
        """The program for batches of this kind, compiled at the first such batch.

        If there are too many, the one that was used least recently is forgotten. All processes see
        the same kinds in the same order, so they forget the same.
        """
        make, most = partial(self.build, batch, kind, steps), self.job.options.max_programs
        program, old = recent(self.ready, kind, make, most)
        for one in old:
            self.assigned.pop(one, None)
            self.made.pop(one, None)
            self.check.known.pop(one, None)
        if old:
            self.shipping.forget()
        return program

    def known_reduction(self, kind: BatchKind) -> LossReduction | None:
        """That of all programs for the same shapes and flags, whatever the state in Python is.

        Only the first process knows this state before a step. None: there is no program, or a loss
        divides by something else in another state (class weights that a loop changes).
        """
        same = [one for one in self.assigned if one[:2] == kind[:2]]
        forms = [self.assigned[one].common.form for one in same]
        return self.reduction(same[0]) if same and forms.count(forms[0]) == len(forms) else None

    def reduction(self, kind: BatchKind) -> LossReduction:
        """How the losses of microbatches become one, for a kind of batch with a program."""
        return self.job.reduction(self.assigned[kind].common.form)

    def build(self, batch: Batch, kind: BatchKind, steps: int) -> Program:
        if self.comm is None and not self.agreed:
            consistency.refuse_disagreement(common_arguments(self.job, batch), self.job.model)
        mine, kernels = self.assign(batch, kind)
        self.assigned[kind] = mine
        self.check.remember(self.job, batch, kind)
        self.job.whole_inputs.learn(batch, mine.common.whole)
        self.turns.update(mine.turns)
        self.statistics.update(mine.common.statistics)
        if self.comm is None:
            self.comm = communicators(self.job.device)
        self.comm.extend(mine.needs)
        with memory_explained(mine, self.state):
            program = load(self.job, mine, kernels, self.state, self.comm, steps)
            keep_constant(self.state, mine.common.form.held, self.job.initial)
            self.prepare(program, mine, joins(mine, kernels, self.job.options.compiled))
        return program

    def assign(self, batch: Batch, kind: BatchKind) -> tuple[Assignment, Kernels]:
        if self.rank:
            return self.shipping.other(self.rank)

        def make() -> tuple[Captured, Compiled]:
            refuse_wrong_world(self.job.strategy.devices)  # known before the capture
            if world() > 1:
                LOG.info("compiling on device 0, for all %d", world())
            compiling = partial(self.job.compile, batch, self.costs, by_role=True)
            running = self.job.first_inputs.running(self.job.model, self.job.loss_fn, batch)
            with running, collector_off():  # it would look at all of torch for nothing
                captured, compiled = counting_arguments(compiling, batch, self.arguments)
            refuse_wrong_world(compiled.dag.devices)
            self.made[kind], self.aliases = compiled, captured.aliases
            return captured, compiled

        for line in new_program_lines(self.job, batch, kind, list(self.ready)):
            LOG.info("%s", line)
        if world() > 1:
            return self.shipping.first(make)
        captured, compiled = make()
        return assignment(captured, compiled, 0), captured.kernels

    def prepare(self, program: Program, mine: Assignment, joins: Joins | None = None) -> None:
        """Join runs. On a GPU, run every kernel once and record graphs.

        No message may be in flight then.
        """
        on_gpu = self.job.device.type == "cuda"
        if joins is not None:
            program.faster = join_runs(program, joins)
        if joins is not None and (on_gpu or self.job.options.compiled):
            program.each_alone = partial(warm, program, mine.known, mine.part.experts)
        if not on_gpu:
            return
        with on_compute_stream(program.plan, program.device):
            warm(program, mine.known, mine.part.experts, joins)
        record, wanted = partial(recorded, program, mine, joins), self.job.options.graphs
        if wanted is True:
            program.faster = record()
        elif wanted == "auto" and self.may_choose and is_suited(program.plan):
            given = program, program.faster, record
            program.faster = GraphChoice(*given, device_clock, free_memory, reserved_memory)

    @property
    def may_choose(self) -> bool:
        """Graphs hold memory, so only batches like the first may get them without being asked."""
        return not self.ready and self.job.options.on_nan is None

    def settle(self) -> None:
        """Give all replicas the running statistics of the first. All processes call it."""
        self.refuse_missed()
        if self.statistics:
            take_from_first(self.state, self.statistics, self.rank)

    def compile_again(self, costs: Costs) -> None:
        """Compile again with these costs, at the next batch."""
        self.costs, self.ready, self.alike = costs, {}, set()  # messages may have another order

    def fix_gathers(self) -> bool:
        """Compile again, with gathers that do not depend on lengths. False: they do not already."""
        if self.fixed or not any(map(holds_freely, self.job.strategy)):
            return False
        self.job.cut[:] = [Strategy(map(with_fixed_buffers, one)) for one in self.job.cut]
        self.fixed, self.ready, self.alike = True, {}, set()
        return True

    @property
    def reported_states(self) -> set[str]:
        """The states that this device reports. Others may hold the same."""
        return {name for name, (place, _) in self.turns.items() if place == 0}

    def close(self) -> None:
        for program in self.ready.values():
            release(program)
        if self.comm is not None:
            self.comm.close()
            self.comm = None
        self.refuse_missed()

    def refuse_missed(self) -> None:
        """Before what was trained is used: an error if a step missed what a loop had changed."""
        self.job.python_state.settle()
        self.check.settle()


def release(program: Program) -> None:
    """Drop its functions, which refer to it. Else the garbage collector would free its memory."""
    program.acts = program.own = []
    program.faster, program.each_alone = None, lambda: None
    program.slots = [None] * len(program.slots)


def recorded(program: Program, mine: Assignment, joins: Joins | None) -> Graphs:
    """Record the program. Graphs have memory of their own, so what was cached is given back.

    Their workspaces are in their pool. Given back, they end with it.
    """
    empty_cache(program.device)
    with on_compute_stream(program.plan, program.device):
        found = record_graphs(program, mine.known, joins=joins)
    empty_cache(program.device)
    return found


def whole_state(programs: Programs) -> dict[str, torch.Tensor] | None:
    """The state dict of the whole model on device 0. The others get None."""
    programs.refuse_missed()
    everywhere = gather(programs.state.parts(programs.reported_states))
    if everywhere is None:
        return None
    parts = assembled(part for parts in everywhere for part in parts)
    given = programs.aliases, partial(first_value, programs.job.initial)
    return state_dict_of(programs.job.model, lambda like: programs.state.whole(parts, like, *given))


def first_value(initial: Callable[[str], torch.Tensor], name: str, own: Tensor) -> Tensor:
    """The model has it, unless it is on `meta`; it stays there if nothing says its values."""
    with suppress(CaptureError):
        return initial(name) if own.is_meta else own
    return own


def loss_scale(precision: Precision | None) -> DynamicLossScale | None:
    if precision is None or precision.loss_scale is None:
        return None
    how = precision.loss_scale
    return DynamicLossScale(how.init, how.growth, how.backoff, how.interval)


def load(
    job: Job, mine: Assignment, kernels: Kernels, state: DeviceState, comm: Comm, steps: int = 0
) -> Program:
    """Make a plan executable: with its parameters, kernels and communicators."""
    options, trainable = job.options, mine.part.trainable.__getitem__
    state.ema, known = options.ema, set(state.buckets)
    state.kept.make = options.optimizer
    make = with_attributes(options.optimizer, dict(job.model.named_parameters()))
    state.add(mine.plan.states, mine.part.contents, trainable, job.initial, make)
    if steps:
        start_late(state, known)
    if options.lr_scheduler is not None:
        state.schedule(options.lr_scheduler, steps)
    state.kept.look(state.optimizers().values())
    if state.loss_scale is None:
        state.loss_scale = loss_scale(job.precision)

    def kernel(region: str, phase: str) -> Kernel:
        return kernels.get(mine.part.regions[region], Phase(phase), options.compiled)

    if not options.compiled:  # else runs are joined first, and fewer kernels are needed
        for region, phase in mine.part.runs:
            kernel(region, phase)
    loss = getattr(torch, mine.common.loss)
    return Program(mine.plan, kernel, state, comm, loss)


def joins(mine: Assignment, kernels: Kernels, compiled: bool) -> Joins:
    """How forwards of this device are joined.

    Backwards are not: joined, they hold all their gradients at once, and have as many kernels.
    """

    def fits(run: Run) -> bool:
        return run.phase == F and kernels.can_join(mine.part.regions[run.region], compiled)

    def kernel(sequence: KernelSequence) -> Kernel:
        regions = [mine.part.regions[run.region] for run in sequence.runs]
        return kernels.join(regions, sequence.wiring.reads, sequence.wiring.results, compiled)

    most = kernel_sequences.MOST if compiled else kernel_sequences.MOST_EAGER
    return Joins(fits, kernel, most, compiled, (lambda: 0) if compiled else reached)


def common_arguments(job: Job, batch: Batch) -> dict[str, str]:
    """The arguments that must be the same on all processes."""
    names = ("max_norm", "ema", "on_nan", "compiled", "graphs", "seed", "whole")
    return {
        "strategy": str(job.strategy),
        "example": repr(alike(batch.shapes)),
        "model": f"{consistency.structure(job.model)} {consistency.flags(job.model)}",
        "device": job.device.type,
        "reduction": repr(job.options.reduction),
        "precision": repr(job.precision),
        **{name: repr(getattr(job.options, name)) for name in names},
        **described_functions(job),
    }


def described_functions(job: Job) -> dict[str, str]:
    """The functions that the user gives: their options, their code, and what it reads."""
    names = ("optimizer", "lr_scheduler", "loss_weight", "init")
    given = {name: getattr(job.options, name) for name in names} | {"loss_fn": job.loss_fn}
    given["optimizer"] = as_given(job.options.optimizer)
    return {
        path: text
        for name, one in given.items()
        for path, text in described(name, one, job.model).items()
    }
