"""Programs that only go forward: the strategy of a job without its backward, order and updates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from piper.capture import Captured, capture, of_sizes
from piper.capture.kernels.callables import Kernels
from piper.capture.loss import LossForm
from piper.capture.output_rows import OutputRows
from piper.capture.trace.arguments.layouts import refuse_asked
from piper.capture.trace.arguments.outputs import Output, joined
from piper.directives import Directive, Offload, Place, Replicate, Shard, Split, Stage, Strategy
from piper.directives.stage import layers_of
from piper.errors import InputError
from piper.ir.filters import Both, Either, Not, accepts
from piper.ir.model import Model
from piper.job.batch.batch import Batch
from piper.job.compile.assignment import Assignment, assignment
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.division import division_requests
from piper.job.job import BatchKind, Job
from piper.job.loop.recent import recent
from piper.job.loss.mean_loss_check import refuse_no_mean
from piper.job.programs.programs import Programs
from piper.job.trained_parameters import TrainedParameters
from piper.names import PASS, F, Phase, amount
from piper.runtime.execute import Kernel, Program
from piper.runtime.forward_program import OutputProgram
from piper.runtime.processes.world import world
from piper.runtime.state.constants import keep_constant
from piper.runtime.state.device_state import DeviceState
from piper.runtime.state.shared_state import shared_state

Wanted = Literal["loss", "outputs"]
WHERE = (Place, Replicate, Shard, Split, Stage)  # directives that are about the forward, too
PARAMETERS = "parameters"  # what forwards fetch from host memory


def forward_strategy(strategy: Iterable[Directive], microbatches: int) -> Strategy:
    """Where everything is, without any order: there is no backward to put in between."""
    return Strategy(
        replace(one, n=microbatches, sizes=None) if isinstance(one, Split) else one
        for one in strategy
        if is_about_forwards(one) and not is_backward_only(one)
    )


def is_about_forwards(directive: Directive) -> bool:
    if isinstance(directive, Offload):
        return directive.what == PARAMETERS
    return isinstance(directive, WHERE)


def is_backward_only(directive: Directive) -> bool:
    wanted = getattr(directive, "filter", None)
    return wanted is not None and not may_be_forward(wanted)


def may_be_forward(wanted: Any) -> bool:
    match wanted:
        case Either():
            return any(map(may_be_forward, wanted.parts))
        case Both():
            return all(map(may_be_forward, wanted.parts))
        case Not():
            return True
    return all(accepts(value, str(F)) for key, value in wanted.items if key == PASS)


@dataclass
class ForwardPrograms:
    """The programs of this process that only go forward, by kind of batch."""

    programs: Programs
    ready: dict[tuple[BatchKind, Wanted], Program] = field(default_factory=dict)
    # On device 0: the nesting of outputs, by the rows of a microbatch.
    outputs: dict[BatchKind, dict[int, Output]] = field(default_factory=dict)
    row_dimensions: dict[BatchKind, tuple[int | None, ...]] = field(
        default_factory=dict
    )  # of these
    forms: dict[BatchKind, LossForm] = field(default_factory=dict)  # of the loss
    asked: dict[BatchKind, str] = field(default_factory=dict)  # lines about the batch's layout
    state: DeviceState | None = None  # in whose memory the programs of `ready` read
    reads: int = 0  # of files into it, when these were made: they have what no step trains
    fixed: bool = False  # how these gather parameters

    @property
    def job(self) -> Job:
        return self.programs.job

    @property
    def rank(self) -> int:
        return self.programs.rank

    def job_for(self, batch: Batch) -> Job:
        """The job with as many microbatches as the batch can be cut into.

        The last batch of a data set may be smaller than the others.
        """
        rows = batch.rows or 1
        parts = self.job.feeds.parts
        if rows % parts:
            what = f"it has {rows} rows, for {parts} replicas that share it"
            raise InputError.of("batch", what, f"give it a multiple of {parts} rows")
        every = (one // parts for one in self.job.rows.rows_of_all(rows, self.feed))
        count = math.gcd(*every, self.job.strategy.microbatches)
        cut = forward_strategy(self.job.cut[0] if self.job.cut else self.job.strategy, count)
        return replace(self.job.under(cut), cut=[cut])

    @property
    def feed(self) -> int:
        """Which batches this process is given."""
        return self.job.feeds.feed(self.rank)

    def kind(self, batch: Batch) -> BatchKind:
        return self.job.kind(batch, self.feed)

    @property
    def is_current(self) -> bool:
        state = self.programs.state
        same = self.state is state and self.reads == state.reads
        return same and self.fixed == self.programs.fixed

    def has(self, batch: Batch, wanted: Wanted) -> bool:
        return self.is_current and (self.kind(batch), wanted) in self.ready

    def get(self, batch: Batch, wanted: Wanted) -> tuple[Program, Job]:
        job = self.job_for(batch)
        key = self.kind(batch), wanted
        if not self.is_current:  # another strategy may have moved everything
            self.ready, self.state, self.fixed = {}, self.programs.state, self.programs.fixed
            self.reads = self.state.reads
        make, most = partial(self.build, job, batch, wanted), job.options.max_programs
        program, old = recent(self.ready, key, make, most)
        refuse_asked(batch.tensors, self.asked.get(key[0], ""))
        job.python_state.refuse_attributes(batch.tensors)
        for kind, _ in old:
            self.outputs.pop(kind, None)
            self.row_dimensions.pop(kind, None)
            self.forms.pop(kind, None)
            self.asked.pop(kind, None)
        if old:
            self.programs.shipping.forget()
        return program, job

    def build(self, job: Job, batch: Batch, wanted: Wanted) -> Program:
        mine, kernels = self.assign(job, batch, wanted)
        comm = self.programs.comm
        assert comm is not None
        comm.extend(mine.needs)
        part, options = mine.part, job.options
        trainable = part.trainable.__getitem__
        state = shared_state(
            self.programs.state, mine.plan.states, part.contents, trainable, job.initial
        )

        def kernel(region: str, phase: str) -> Kernel:
            return kernels.get(part.regions[region], Phase(phase), options.compiled)

        kind = Program if wanted == "loss" else OutputProgram
        program = kind(mine.plan, kernel, state, comm, getattr(torch, mine.common.loss))
        keep_constant(state, mine.common.form.held, job.initial)
        self.forms[self.kind(batch)] = mine.common.form
        self.asked[self.kind(batch)] = mine.common.asked
        self.programs.statistics.update(mine.common.statistics)
        job.whole_inputs.learn(batch, mine.common.whole)
        if job.device.type == "cuda":
            self.programs.prepare(program, mine)
        return program

    def assign(self, job: Job, batch: Batch, wanted: Wanted) -> tuple[Assignment, Kernels]:
        shipping, rank = self.programs.shipping, self.programs.rank
        if rank:
            return shipping.other(rank)
        make = partial(self.compile, job, batch, wanted)
        if world() > 1:
            return shipping.first(make)
        captured, compiled = make()
        return assignment(captured, compiled, 0), captured.kernels

    def compile(self, job: Job, batch: Batch, wanted: Wanted) -> tuple[Captured, Compiled]:
        with job.first_inputs.running(job.model, job.loss_fn, batch):
            return self.compiled(job, batch, wanted)

    def compiled(self, job: Job, batch: Batch, wanted: Wanted) -> tuple[Captured, Compiled]:
        kind = self.kind(batch)
        batch = job.rows.as_first(job.judged(batch, job.microbatches), self.feed)
        captured = captured_forward(job, batch, wanted, self.job.trained)
        others = {rows: one.output for rows, one in captured.others.items()}
        self.outputs[kind] = {(batch.rows or 1) // job.microbatches: captured.output, **others}
        if wanted == "outputs":
            self.row_dimensions[kind] = dimensions_of(job, batch, captured)
        if captured.meeting and job.all_microbatches > 1:
            job.trials.warn_of_evaluation(captured.meeting)
        if wanted == "loss":
            captured = replace(captured, form=job.form(captured, batch, always=True))
            warn_of_average(job, captured, batch)
        program = job.rows.written(job.strategy.directives, batch)
        model = captured.model_with(())
        refuse_other_layers(job.strategy, model, wanted)
        costs = job.machine.costs(model)
        compiled = compile_strategy(model, program, costs=costs, by_role=True)
        return captured, compiled


def warn_of_average(job: Job, captured: Captured, batch: Batch) -> None:
    """A loss that is no mean over rows, as far as Piper sees, of a model with one microbatch: the
    batches of an evaluation are averaged, as a loop would do."""
    form, said = captured.form, job.options.says_reduction
    if form.kind is not None or said or job.loss_fn is None or job.all_microbatches > 1:
        return
    try:
        refuse_no_mean(job.loss_fn, captured.output, batch, batch.rows or 0, "mean", form)
    except InputError:
        job.trials.warn_once(
            "evaluate averages the losses of batches by their rows, as Piper does not see that the "
            'loss is a mean over rows: if it is a sum over rows, give the Trainer reduction="sum"; '
            "if rows have different weights, loss_weight=lambda *microbatch: the weight of its rows"
        )


def refuse_other_layers(strategy: Strategy, model: Model, wanted: Wanted) -> None:
    """Parameters stay on the stages that training put them on, layer by layer."""
    for stage in strategy:
        if not isinstance(stage, Stage) or isinstance(stage.stages, int):
            continue
        found, known = len(layers_of(model.regions, stage.name)), sum(stage.stages)
        if found != known:
            raise InputError.of(
                "evaluate" if wanted == "loss" else "predict",
                f"the model runs {amount(found, 'layer')} here, and {known} in training, of which "
                f"its {len(stage.stages)} stages have {list(stage.stages)}",
                "run the same layers in `eval()` and for all outputs, or use one stage, pp=1",
            )


def dimensions_of(job: Job, batch: Batch, captured: Captured) -> tuple[int | None, ...]:
    """Where the outputs of the model have rows."""
    one = job.first_microbatch(batch)
    example = (*job.converted(one).arguments, None)
    given = example, one.whole, job.device.type, job.precision
    return OutputRows(job.model, captured.output, *given).dimensions()


def captured_forward(
    job: Job, batch: Batch, wanted: Wanted, trained: TrainedParameters
) -> Captured:
    """The model without gradients, divided as in training, for microbatches of each size."""
    parts = job.rows.of_each_size(batch).items()
    return of_sizes({rows: captured_part(job, one, wanted, trained) for rows, one in parts})


def captured_part(job: Job, one: Batch, wanted: Wanted, trained: TrainedParameters) -> Captured:
    job.find_layers(one)
    example = job.converted(one).arguments
    loss_fn: Any = job.loss_fn
    if wanted == "outputs":
        loss_fn, example = joined, (*example, None)
    given = job.model, loss_fn, example, job.device.type
    rest = job.precision, frozenset(trained.names), one.whole
    undivided = job.layers.captured(job.model, lambda: capture(*given, (), *rest))
    job.python_state.see(job.model, undivided.visit)
    requests = trained.held(division_requests(undivided.model, job.strategy.directives))
    return capture(*given, requests, *rest) if requests else undivided
