"""Train with Piper and with plain PyTorch, and compare."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from piper.capture import Captured
from piper.capture.trace.arguments.inputs import name_of
from piper.directives import Strategy
from piper.job.batch.batch import Batch
from piper.job.batch.input_names import input_names
from piper.job.batch.random_batches import constant_inputs, doubled
from piper.job.compile.compiler import Compiled
from piper.job.job import Job
from piper.job.memory.host_memory import free_memory
from piper.job.numerics.differences import (
    gradient_differences,
    largest,
    largest_differences,
    relative,
    update_differences,
    worst,
)
from piper.job.numerics.model import (
    copied,
    in_double,
    is_random,
    refuse_large,
    widest,
    without_dropout,
)
from piper.job.numerics.random_data import random_data
from piper.job.numerics.reference import Reference, plain
from piper.job.programs.rehearsal import Rehearsal, rehearsed
from piper.job.python_state import PythonState
from piper.runtime.state.device_state import BucketState, Part


@dataclass(frozen=True, slots=True)
class Step:
    """One step of both. `microbatches` is the largest relative difference of their losses."""

    loss: float
    expected_loss: float
    grad_norm: float
    expected_grad_norm: float
    microbatches: float

    @property
    def difference(self) -> float:
        losses = relative(self.loss, self.expected_loss)
        return worst(losses, relative(self.grad_norm, self.expected_grad_norm), self.microbatches)


@dataclass(frozen=True, slots=True)
class Parameter:
    """The largest differences of a parameter or a buffer, relative to its own largest number."""

    name: str
    gradient: float  # of the first step
    update: float  # the change over all steps; of a buffer, its value
    is_buffer: bool = False

    @property
    def difference(self) -> float:
        return worst(self.gradient, self.update)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of both. `tolerance` is half the digits of the coarsest type in the model."""

    dtype: str
    coarsest: str
    tolerance: float
    replicas: int
    microbatches: int  # of all replicas together
    steps: tuple[Step, ...]
    parameters: tuple[Parameter, ...]  # the worst first
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if not p.difference <= self.tolerance)

    @property
    def agrees(self) -> bool:
        return not self.wrong and all(step.difference <= self.tolerance for step in self.steps)


def compare(
    job: Job, example: Batch, captured: Captured, compiled: Compiled, steps: int = 3, seed: int = 0
) -> Comparison:
    """Train both ways on the same random batches, and compare.

    Uses float64 if the model runs in it, so that rounding hides nothing. Dropout is switched off,
    because Piper's masks differ from those of eager PyTorch by design.
    """
    refuse_large(compiled, free_memory())
    names = input_names(job.model, job.loss_fn, example)
    model, notes = copied(job, captured), constant_inputs(example, names)
    batches = random_data(model, job, example, steps, seed)
    fine, why = in_double(model, job, batches[0])
    if fine is not None:
        model, batches = fine, [doubled(batch) for batch in batches]
    here = on_cpu(job.under(Strategy(compiled.program)).without_limit(), model)
    if is_random(captured):
        notes += without_dropout(here, job.rows.divided(batches[0])[0])
    reference = plain(copy.deepcopy(model), on_cpu(job, model), batches)
    observed = Observed(steps)
    found = rehearsed(here, batches, observed)
    tolerance, dtype = float(torch.finfo(reference.coarsest).eps) ** 0.5, widest(model)
    return Comparison(
        dtype=name_of(dtype),
        coarsest=name_of(reference.coarsest),
        tolerance=tolerance,
        replicas=job.replicas,
        microbatches=job.all_microbatches,
        steps=tuple(map(partial(step_of, found, reference), range(steps))),
        parameters=tuple(differences(observed, found, reference)),
        notes=(*notes, *why, *unmixed(job), *reference.warnings(dtype)),
    )


def on_cpu(job: Job, model: torch.nn.Module) -> Job:
    """The same job for a copy of its model, without compilation, graphs and mixed precision."""
    options = replace(
        job.options, device="cpu", compiled=False, graphs=False, init=None, precision=None
    )
    return replace(
        job, model=model, options=options, captures={}, divided={}, python_state=PythonState()
    )


def unmixed(job: Job) -> list[str]:
    if job.precision is None:
        return []
    return ["without mixed precision: precision=... of the script is not used here"]


@dataclass
class Observed:
    """Gradients of the first step and parameters after the last one, on every device."""

    steps: int
    gradients: list[Part] = field(default_factory=list)
    final: list[Part] = field(default_factory=list)
    updates: Counter[int] = field(default_factory=Counter)  # of each bucket, so far

    def __call__(self, bucket: BucketState) -> None:
        self.updates[id(bucket)] += 1
        for name, first, shape, parameter, order in bucket.parts():
            if self.updates[id(bucket)] == 1 and parameter.grad is not None:
                grad = flat(parameter.grad)
                self.gradients.append(Part(name, first, tuple(shape), grad, order))
            if self.updates[id(bucket)] == self.steps:
                final = flat(parameter.detach())
                self.final.append(Part(name, first, tuple(shape), final, order))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().clone()


def step_of(found: Rehearsal, reference: Reference, step: int) -> Step:
    expected, losses = reference.losses[step], found.parts[step]
    apart = [relative(losses.get(k, float("nan")), one) for k, one in enumerate(expected)]
    return Step(
        loss=found.losses[step],
        expected_loss=reference.loss[step],
        grad_norm=found.grad_norms[step],
        expected_grad_norm=reference.grad_norms[step],
        microbatches=worst(*apart),
    )


def differences(observed: Observed, found: Rehearsal, reference: Reference) -> list[Parameter]:
    """Differences of all parameters that are trained, and of buffers."""
    gradients = gradient_differences(observed.gradients, reference)
    updates = update_differences(observed.final, reference)
    rows = [Parameter(name, gradients[name], updates[name]) for name in gradients]
    for name, buffer in reference.buffers.items():
        if name in found.parameters:
            part = Part(name, 0, tuple(buffer.shape), found.parameters[name].flatten())
            whole = {name: buffer.flatten()}
            apart = largest_differences([part], whole, {}, {name: largest([buffer])})
            rows.append(Parameter(name, 0.0, apart[name], is_buffer=True))
    return sorted(rows, key=lambda row: (-row.difference, row.name))
