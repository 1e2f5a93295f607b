"""A job: what to train, and how to compile it. A Trainer runs it on all processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from piper.capture import Captured, capture
from piper.capture.precision import TYPES, Precision, precision_of
from piper.costs import Costs, mode_of, read_costs
from piper.directives import Place, Strategy
from piper.ir.replicas import Replicas, replicas
from piper.job.arguments import refuse_wrong_model
from piper.job.batch import Batch, Shapes, refuse_uneven
from piper.job.compiler import Compiled, compile_strategy
from piper.job.consistency import flags
from piper.job.loss_reduction import Ignored, LossReduction, reduction_of, refuse_ignored
from piper.job.mean_loss_check import refuse_no_mean
from piper.job.options import Loss, Options
from piper.names import amount
from piper.runtime.batch import StepInputs
from piper.runtime.hardware import chosen_device
from piper.runtime.state.initial_values import initial_values

LOG = logging.getLogger("piper")
BatchKind = tuple[
    Shapes, tuple[bool, ...]
]  # what a program is compiled for: shapes, and model flags


@dataclass(frozen=True, eq=False)
class Job:
    """A model, its loss, a strategy and options."""

    model: torch.nn.Module
    loss_fn: Loss | None
    strategy: Strategy
    options: Options = Options()
    captures: dict[BatchKind, Captured] = field(
        default_factory=dict, repr=False
    )  # by kind of microbatch

    def __post_init__(self) -> None:
        """Check everything now, before this process waits for any other."""
        refuse_wrong_model(self.model, self.loss_fn)
        _ = self.device, self.reduction, self.costs, self.initial

    @cached_property
    def device(self) -> torch.device:
        return chosen_device(self.options.device)

    @cached_property
    def feeds(self) -> Replicas:
        return replicas(d.devices for d in self.strategy if isinstance(d, Place))

    @cached_property
    def reduction(self) -> LossReduction:
        said, weight = self.options.reduction, self.options.loss_weight
        return reduction_of(said, self.loss_fn, weight, self.all_microbatches)

    @cached_property
    def costs(self) -> Costs:
        """Measured costs if given, else estimates, for the mode in which regions run."""
        return read_costs(self.options.costs, mode_of(self.options.compiled, self.options.graphs))

    @cached_property
    def precision(self) -> Precision | None:
        return precision_of(self.options.precision)

    @property
    def replicas(self) -> int:
        """The number of parts of the data. Replicas that share devices share a batch."""
        return len(self.feeds.feeds)

    @property
    def microbatches(self) -> int:
        """Microbatches in the batch of a process."""
        return self.strategy.microbatches * len(self.feeds.feeds[0])

    @property
    def all_microbatches(self) -> int:
        """Microbatches of all replicas together."""
        return self.microbatches * self.replicas

    @cached_property
    def initial(self) -> Callable[[str], torch.Tensor]:
        """How to get the first value of a parameter or buffer, by name."""
        master = TYPES[self.precision.master] if self.precision else None
        return initial_values(self.model, self.options.seed, self.options.init, master)

    def under(self, strategy: Strategy) -> Job:
        """The same job with another strategy. Both share their captures."""
        return replace(self, strategy=strategy)

    def kind(self, batch: Batch) -> BatchKind:
        return batch.shapes, flags(self.model)

    def capture(self, batch: Batch) -> Captured:
        """Capture the model for microbatches of this batch, once for each kind of microbatch."""
        one, started = batch.part(0, self.microbatches), time.perf_counter()
        kind = self.kind(one)
        if kind not in self.captures:
            example = self.converted(one).arguments
            made = capture(self.model, self.loss_fn, example, self.device.type, self.precision)
            self.captures[kind] = made
        found = self.captures[kind]
        LOG.info("captured %s in %.1f s", regions_text(found), time.perf_counter() - started)
        return found

    def converted(self, batch: Batch) -> Batch:
        """The batch with inputs of the type that the model computes in. Labels stay as they are."""
        if self.precision is None:
            return batch
        return batch.in_type(TYPES[self.precision.compute], labels=self.loss_fn is not None)

    def compile(
        self, batch: Batch, costs: Costs | None = None, by_role: bool = False
    ) -> tuple[Captured, Compiled]:
        """Capture the model for this kind of batch, apply the strategy, and check the plans.

        `costs` replaces those of the options. `by_role` makes plans for one device per role only.
        """
        refuse_uneven(batch, self.microbatches)
        captured, started = self.capture(batch), time.perf_counter()
        self.try_mean(batch)
        compiled = compile_strategy(
            captured.model,
            self.strategy.directives,
            clip=self.options.max_norm is not None,
            costs=costs or self.costs,
            by_role=by_role,
        )
        for region, cut in compiled.dag.shardings.items():
            captured.experts.prove(compiled.dag.model.by_id[region].code, cut.ways)
        LOG.info("compiled %s in %.1f s", plans_text(compiled), time.perf_counter() - started)
        return captured, compiled

    @property
    def relies_on_mean(self) -> bool:
        """Whether the mean loss of the microbatches must be the loss of the whole batch."""
        return self.all_microbatches > 1 and self.reduction.is_plain_mean

    def captured(self, batch: Batch) -> Captured | None:
        """What was captured before. None on processes that do not capture."""
        return self.captures.get(self.kind(batch.part(0, self.microbatches)))

    def try_mean(self, batch: Batch) -> None:
        """Check that the loss is a mean, on the process that captured the model."""
        found = self.captured(batch)
        if found is not None and self.relies_on_mean:
            refuse_no_mean(self.loss_fn, found.output, batch, self.microbatches, found.ignored)

    def weights(self, batch: Batch) -> list[float]:
        """The weight of each microbatch of this batch."""
        return self.reduction.weights(batch, self.microbatches)

    def inputs(
        self,
        batch: Batch,
        shares: Sequence[float],
        ignored: Sequence[Ignored],
        step: int = 0,
        feed: int = 0,
        move: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> StepInputs:
        """The inputs of a program for one step. Dropout is seeded by the step."""
        if self.relies_on_mean:
            refuse_ignored(batch, ignored)
        moved = self.converted(batch.map(move or (lambda tensor: tensor.to(self.device))))
        seed = self.options.seed * 1_000_003 + step
        first = feed * self.microbatches
        return StepInputs(moved.tensors, tuple(shares), seed, self.options.max_norm, first)


def regions_text(captured: Captured) -> str:
    regions = captured.model.regions
    unique = len({region.code for region in regions})
    return f"{amount(len(regions), 'region')}, {unique} of them unique"


def plans_text(compiled: Compiled) -> str:
    count = sum(len(plan.instructions) for plan in compiled.plans)
    plans = amount(len(compiled.plans), "plan")
    return f"and checked {plans}, {amount(count, 'instruction')}"
