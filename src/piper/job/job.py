"""A job: what to train, and how to compile it. A Trainer runs it on all processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from piper.capture import Captured, capture, of_known_sizes, of_sizes
from piper.capture.loss import LossForm
from piper.capture.precision import TYPES, Precision, precision_of
from piper.capture.python_state.function_caches import looking_once
from piper.capture.python_state.loss_state import loss_buffers
from piper.costs import Costs
from piper.directives import Directive, Remat, Split, Strategy
from piper.ir.placement.division import DivisionRequest
from piper.ir.placement.replicas import Replicas
from piper.job.arguments import refuse_synchronised_norms, refuse_unmatched, refuse_wrong_model
from piper.job.batch.batch import Batch, Shapes, refuse_uneven
from piper.job.batch.batch_arguments import batch_of, example_of, inputs_of
from piper.job.batch.fixed_rows import FixedRows
from piper.job.batch.replica_batches import ReplicaBatches
from piper.job.batch.whole_inputs import KnownInputs, WholeInputs
from piper.job.capture_errors import FirstInputs
from piper.job.compile.chosen_directives import log_capture, plans_text, with_stages
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.division import division_requests, feeds_of, is_dense
from piper.job.compile.layer_search import LayerSearch
from piper.job.device_costs import TargetMachine, target_machine
from piper.job.first_lines import first_lines
from piper.job.loop.around_step import refuse_modes
from piper.job.loop.forward_prints import prints_shown_once
from piper.job.loop.recent import recent
from piper.job.loss.guard_check import refuse_bent
from piper.job.loss.loss_form import is_settled, loss_form
from piper.job.loss.loss_reduction import (
    LossReduction,
    accumulation_lines,
    alike,
    reduction_of,
    refuse_wrong_reduction,
)
from piper.job.loss.microbatch_trial import MicrobatchTrials
from piper.job.loss.trial_size import trial_runs
from piper.job.loss.whole_batch import WholeBatch
from piper.job.memory.elementwise_choice import policies, without_elementwise
from piper.job.memory.memory_check import refuse_too_large
from piper.job.memory.memory_limit import MemoryLimit, memory_limit, optimizer_state, require_limit
from piper.job.memory.remat_choice import fitted
from piper.job.memory.zero_choice import fewest_messages_that_fit
from piper.job.optimizer_options import refuse_optimizer
from piper.job.options import Loss, Options
from piper.job.processes.consistency import flags
from piper.job.python_state import PythonState
from piper.job.trained_parameters import TrainedParameters
from piper.runtime.batch import StepInputs
from piper.runtime.hardware import chosen_device
from piper.runtime.state.initial_values import initial_values
from piper.strategies.cuts import with_cuts

LOG = logging.getLogger("piper")
# What a program is compiled for: shapes, flags of the model, and the number of its Python state.
BatchKind = tuple[Shapes, tuple[bool, ...], int]


@dataclass(frozen=True, eq=False)
class Job:
    """A model, its loss, a strategy and options."""

    model: torch.nn.Module
    loss_fn: Loss | None
    strategy: Strategy
    options: Options = Options()
    # By kind of microbatch:
    captures: dict[BatchKind, Captured] = field(default_factory=dict, repr=False)  # whole models
    # Also by what is divided:
    divided: dict[tuple[BatchKind, str], Captured] = field(default_factory=dict, repr=False)
    forms: dict[BatchKind, LossForm] = field(default_factory=dict, repr=False)  # of the loss
    trials: MicrobatchTrials = field(default_factory=MicrobatchTrials, repr=False)
    trained: TrainedParameters = field(default_factory=TrainedParameters, repr=False)
    cut: list[Strategy] = field(default_factory=list, repr=False)  # with the stages of the first
    python_state: PythonState = field(default_factory=PythonState, repr=False)
    known_inputs: KnownInputs = field(default_factory=KnownInputs, repr=False)
    first_inputs: FirstInputs = field(default_factory=FirstInputs, repr=False)
    layers: LayerSearch = field(default_factory=LayerSearch, repr=False)

    def __post_init__(self) -> None:
        """Check everything now, before this process waits for any other."""
        refuse_modes()
        refuse_wrong_model(self.model, self.loss_fn)
        refuse_unmatched(self.model, self.options.no_decay)
        refuse_wrong_reduction(self.options.reduction)
        _ = self.device, self.machine, self.initial

    @cached_property
    def whole_inputs(self) -> WholeInputs:
        """Which inputs microbatches share. It is found out once for all strategies."""
        return WholeInputs(self.model, self.loss_fn, self.options.whole, self.known_inputs)

    @cached_property
    def device(self) -> torch.device:
        return chosen_device(self.options.device)

    @cached_property
    def feeds(self) -> Replicas:
        return feeds_of(self.strategy)

    def reduction(self, form: LossForm) -> LossReduction:
        """How the losses of microbatches become one, given what is proved of the loss."""
        said, weight = self.options.reduction, self.options.loss_weight
        return reduction_of(said, self.loss_fn is None, weight, self.all_microbatches, form)

    @cached_property
    def machine(self) -> TargetMachine:
        """What stages are cut and work is ordered for, in the mode in which regions run."""
        return target_machine(self.options, self.device)

    @cached_property
    def precision(self) -> Precision | None:
        return precision_of(self.options.precision)

    @cached_property
    def memory(self) -> MemoryLimit | None:
        """The memory of a device that counts. None: it is not known."""
        wanted = [one.memory_gib for one in self.strategy if isinstance(one, Remat)]
        return memory_limit(self.device, [self.options.memory_gib, *wanted], self.state_size)

    def state_size(self) -> float:  # tries the optimizer, so only if one must know
        return optimizer_state(self.options.optimizer, self.options.ema is not None)

    @property
    def replicas(self) -> int:
        """The number of parts of the data. Replicas that share devices share a batch."""
        return len(self.feeds.feeds)

    @property
    def microbatches(self) -> int:
        """Microbatches in the batch of a process."""
        return self.strategy.microbatches * self.feeds.parts

    @property
    def all_microbatches(self) -> int:
        """Microbatches of all replicas together."""
        return self.microbatches * self.replicas

    @cached_property
    def rows(self) -> ReplicaBatches:
        """How batches are cut."""
        split = next((one for one in self.strategy if isinstance(one, Split)), Split("MB", 1))
        return ReplicaBatches(split, self.feeds)

    def weights(self, reduction: LossReduction, batch: Batch) -> list[float]:
        """The weight of each microbatch of a batch."""
        return reduction.weights(batch, self.microbatches, self.rows.microbatches(batch))

    @cached_property
    def initial(self) -> Callable[[str], torch.Tensor]:
        """How to get the first value of a parameter or buffer, by name."""
        master = TYPES[self.precision.master] if self.precision else None
        more = loss_buffers(self.loss_fn)
        return initial_values(self.model, self.options.seed, self.options.init, master, more)

    def under(self, strategy: Strategy) -> Job:
        """The same job with another strategy. Both share their captures."""
        return replace(self, strategy=strategy, cut=[], trained=self.trained.anywhere())

    def without_limit(self) -> Job:
        """The same job on devices with any amount of memory."""
        return replace(self, options=replace(self.options, memory_gib=None))

    def example(self, example: Any, where: str = "example") -> Batch:
        """A batch as a loader gives it."""
        found = self.whole_inputs.marked(example_of(self.model, self.loss_fn, example, where))
        return self.judged(found, max(2, self.microbatches)) if self.rows.unequal else found

    def batch(self, example: Batch, given: tuple[Any, ...], named: dict[str, Any]) -> Batch:
        """The batch of a step, called with these arguments."""
        return self.whole_inputs.marked(batch_of(self.model, self.loss_fn, example, given, named))

    def inputs_only(self, example: Batch, given: tuple[Any, ...], named: dict[str, Any]) -> Batch:
        """What a model is called with, without labels for a loss function."""
        return self.whole_inputs.marked(inputs_of(self.model, self.loss_fn, example, given, named))

    @prints_shown_once()
    def judged(self, batch: Batch, parts: int) -> Batch:
        """The batch, with what microbatches share found out if it is cut into several parts."""
        given = self.converted(batch), parts, self.device.type, self.precision
        found = self.whole_inputs.found(*given)
        return replace(batch, whole=found.whole)

    def failing_on_parts(self, whole: Batch, part: Batch) -> AbstractContextManager[None]:
        """Explains errors of a part of a batch, if it runs as a whole."""
        given = self.model, self.loss_fn, self.device.type, self.precision
        return FixedRows(*given).refused(self.converted(whole), self.converted(part))

    def kind(self, batch: Batch, feed: int | None = None) -> BatchKind:
        """What is compiled for a batch. The batches of all feeds in one step are of one kind."""
        shapes = batch.shapes if feed is None else self.rows.first_shapes(batch, feed)
        return shapes, flags(self.model), self.python_state.now()

    def capture(self, batch: Batch, costs: Costs | None = None) -> Captured:
        """Capture the model for microbatches of this batch, once for each kind of microbatch.

        It is divided as the strategy asks, which names regions of the whole model.
        """
        started = time.perf_counter()
        whole = self.capture_of(batch, self.first_microbatch(batch), ())
        requests = self.trained.held(division_requests(whole.model, self.directives(batch, costs)))
        parts = self.rows.of_each_size(batch).items()
        found = of_sizes({rows: self.capture_of(batch, one, requests) for rows, one in parts})
        self.trained.see(found.model)
        log_capture(found, time.perf_counter() - started)
        return found

    def capture_of(self, batch: Batch, one: Batch, requests: Sequence[DivisionRequest]) -> Captured:
        with self.failing_on_parts(batch, one):
            return self.capture_part(one, requests)

    def capture_whole(self, batch: Batch) -> Captured:
        """The model without any division, for the first microbatch."""
        return self.capture_part(self.first_microbatch(batch), ())

    def capture_part(self, one: Batch, requests: Sequence[DivisionRequest]) -> Captured:
        """For one microbatch, once for each kind."""
        kind, most = self.kind(one), self.options.max_programs
        if requests:
            make = partial(self.captured_as, one, requests)
            return recent(self.divided, (kind, repr(requests)), make, most)[0]
        kept, make = self.captures, partial(self.capture_anew, one)
        find = partial(self.find_layers, one)
        return self.layers.around(self.model, find, lambda: recent(kept, kind, make, most)[0])

    def first_microbatch(self, batch: Batch) -> Batch:
        return batch.part(0, self.microbatches, self.rows.microbatches(batch))

    def capture_anew(self, one: Batch) -> Captured:
        make = partial(self.layers.captured, self.model, partial(self.captured_as, one, ()))
        return self.python_state.captured(self.model, self.loss_fn, make)

    def captured_as(self, one: Batch, requests: Sequence[DivisionRequest]) -> Captured:
        """For a microbatch, with these divisions."""
        given = self.model, self.loss_fn, self.converted(one).arguments, self.device.type
        with self.first_inputs.explaining(self.model, self.loss_fn, one):
            return capture(*given, requests, self.precision, None, one.whole)

    def form(self, captured: Captured, batch: Batch, always: bool = False) -> LossForm:
        """What is proved of the loss. With one microbatch, nothing needs to be, but `always`."""
        made = (captured, *captured.others.values())
        every = zip(made, self.rows.of_each_size(batch).values(), strict=False)
        first, *others = (self.form_of(known, one, always) for known, one in every)
        return alike(replace(first, others=tuple(zip(captured.others, others, strict=True))))

    def form_of(self, captured: Captured, one: Batch, always: bool) -> LossForm:
        own = self.loss_fn is None and is_settled(captured.form, self.options.says_reduction)
        if own or (self.all_microbatches == 1 and not always):
            return captured.form
        kind = self.kind(one)
        make = partial(self.form_anew, captured, one)
        found, _ = recent(self.forms, kind, make, self.options.max_programs)
        return found

    def form_anew(self, captured: Captured, one: Batch) -> LossForm:
        example, types = self.converted(one).arguments, (self.device.type, self.precision)
        return loss_form(self.model, self.loss_fn, captured, example, one.whole, *types)

    def directives(self, batch: Batch, costs: Costs | None = None) -> tuple[Directive, ...]:
        """The strategy, as far as stages are cut: those of a divided model are of the whole one."""
        if self.cut:
            return self.cut[0].directives
        if not any(map(is_dense, self.strategy)):
            return self.strategy.directives
        whole = self.capture_whole(batch).model
        found = with_cuts(self.strategy, whole, costs or self.machine.costs(whole))
        self.cut.append(with_stages(self.strategy, found))
        return found

    def converted(self, batch: Batch) -> Batch:
        """The batch with inputs of the type that the model computes in. Labels stay as they are."""
        if self.precision is None:
            return batch
        labels = self.loss_fn is not None and batch.labelled
        return batch.in_type(TYPES[self.precision.compute], labels=labels)

    def find_layers(self, batch: Batch) -> bool:
        """Tag the layers of a model without annotations, if the strategy profits from them."""
        given = batch.arguments if self.loss_fn is None else batch.arguments[:-1]
        return self.layers.finds(self.model, self.strategy, given, self.captures)

    @looking_once()
    def compile(
        self, batch: Batch, costs: Costs | None = None, by_role: bool = False
    ) -> tuple[Captured, Compiled]:
        """Capture the model for this kind of batch, apply the strategy, and check the plans.

        `costs` replaces those of the options. `by_role` makes plans for one device per role only.
        Stages stay where the first kind of batch was cut: parameters do not move while training.
        """
        batch = self.judged(batch, self.microbatches)
        refuse_uneven(batch, self.feeds.parts, self.microbatches)
        self.rows.refuse_uncut(batch)
        first = not self.cut
        captured, started = self.capture(batch, costs), time.perf_counter()
        if self.microbatches > 1:
            self.whole_inputs.refuse_unclear(batch, captured, self.precision)
        captured = replace(captured, form=self.form(captured, batch))
        self.try_mean(batch)
        costs = costs or self.machine.costs(captured.model)
        compiled = self.apply(captured, costs, by_role, batch)
        if self.memory is not None:
            others = partial(self.compile_under, batch, costs)
            refuse_too_large(compiled, self.strategy, self.memory, others)
        for region, cut in compiled.dag.shardings.items():
            captured.experts.prove(compiled.dag.model.by_id[region].code, cut.ways)
        if by_role and compiled.roles.obstacle:
            LOG.info("a plan for every device: %s", compiled.roles.obstacle)
        LOG.info("compiled %s in %.1f s", plans_text(compiled), time.perf_counter() - started)
        if first:
            refuse_optimizer(self.options, self.model, captured.model)
            self.cut.append(with_stages(self.strategy, compiled.program))
            given = self.memory, self.reduction(captured.form)
            for line in first_lines(self.model, self.strategy, captured, compiled, *given):
                LOG.info("%s", line)
        for line in accumulation_lines(captured, self.microbatches, self.replicas):
            self.trials.warn_once(line)
        return captured, compiled

    def apply(self, captured: Captured, costs: Costs, by_role: bool, batch: Batch) -> Compiled:
        """The strategy, with whatever it leaves to the memory of a device."""
        refuse_synchronised_norms(self.model, len(self.feeds.teams))
        model = captured.model_with(policies(self.strategy.directives, captured.model))
        clip, late = self.options.waits_for_norm, self.device.type == "cuda"

        def compile(program: Sequence[Directive]) -> Compiled:
            return compile_strategy(
                model, program, clip=clip, costs=costs, by_role=by_role, late=late,
                state=self.state_size,
            )  # fmt: skip

        program = self.rows.written((self.cut[0] if self.cut else self.strategy).directives, batch)
        auto = any(isinstance(one, Remat) and one.is_auto for one in program)
        limit = require_limit(self.memory) if auto else self.memory
        kept = fewest_messages_that_fit(program, compile, limit, len(model.regions))
        if auto and limit:
            return fitted(kept, compile, limit.peaks, limit.usable, costs)
        return without_elementwise(program, kept, compile)

    def compile_under(self, batch: Batch, costs: Costs, strategy: Strategy) -> Compiled:
        """Another strategy for the same batch, by role, whether or not it fits."""
        other = self.under(strategy)
        refuse_uneven(batch, other.feeds.parts, other.microbatches)
        other.rows.refuse_uncut(batch)
        return other.apply(other.capture(batch, costs), costs, True, batch)

    def captured(self, batch: Batch) -> Captured | None:
        """The whole model, if it was captured before. None on processes that do not capture."""
        parts = self.rows.of_each_size(batch).items() if self.captures else ()
        return of_known_sizes({rows: self.captures.get(self.kind(one)) for rows, one in parts})

    @prints_shown_once()
    def try_mean(self, batch: Batch) -> None:
        """Try what is not proved, on the process that captured the model."""
        found = self.captured(batch)
        if found is None or self.all_microbatches == 1:
            return
        reduction = self.reduction(self.form(found, batch))
        parts = batch.parts(self.microbatches, self.rows.microbatches(batch))
        runs = trial_runs(self.model, self.loss_fn, self.initial, found)
        one, said = reduction.example(parts), self.options.says_reduction
        if reduction.is_guessed:
            given = batch, one.rows or 0, reduction.kind, reduction.form
            refuse_bent(self.loss_fn, found.output, *given, trusted=said)
        sizes = self.rows.of_all_microbatches(batch)
        form = partial(self.form_anew, found) if self.loss_fn is None else None
        whole = WholeBatch(sizes, runs, self.precision, parts, self.replicas, form)
        trial = self.trials.lines(self.kind(one), runs, found, one, reduction, said, whole)
        for line in (*reduction.warnings(parts), *trial):
            self.trials.warn(line)

    def inputs(
        self,
        batch: Batch,
        shares: Sequence[float],
        step: int = 0,
        feed: int = 0,
        move: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> StepInputs:
        """The inputs of a program for one step. Dropout is seeded by the step."""
        moved = self.converted(batch.map(move or (lambda tensor: tensor.to(self.device))))
        options, first = self.options, feed * self.microbatches
        seed = options.seed * 1_000_003 + step
        found = StepInputs(moved.tensors, tuple(shares), seed, options.max_norm, first)
        rows = self.rows.first_rows(batch.rows or 0, feed) if self.rows.unequal else found.first_row
        found = replace(found, first_row=rows, names=self.whole_inputs.plain_names(batch))
        return replace(found, only_finite=options.on_nan is not None, whole=batch.whole)
