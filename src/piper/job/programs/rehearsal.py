"""Rehearse a strategy in one process: every device is a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from piper.capture import Captured, Precision
from piper.capture.python_state.function_caches import looking_once
from piper.capture.trace.arguments.layouts import refuse_asked
from piper.costs import Costs
from piper.directives import Strategy
from piper.errors import InputError
from piper.job.arguments import given_strategy, names_options
from piper.job.batch.batch import Batch, refuse_uneven
from piper.job.batch.batch_arguments import refuse_no_batches
from piper.job.compile.assignment import assignments
from piper.job.compile.compiler import Compiled
from piper.job.job import Job
from piper.job.loop.on_nan import OnNan
from piper.job.loss.loss_reduction import refuse_weightless
from piper.job.options import ADAMW, GraphsOption, Loss, Options
from piper.job.programs.programs import joins, load
from piper.plan.instructions import Plan
from piper.runtime.batch import StepInputs
from piper.runtime.comm.gloo import Comm
from piper.runtime.execute import Program
from piper.runtime.joined_runs import join_runs
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, MakeScheduler
from piper.runtime.state.averages import advance, swap
from piper.runtime.state.device_state import BucketState, DeviceState, assembled
from piper.runtime.state.initial_values import Init
from piper.runtime.steps_in_flight import tell_of_lost
from piper.runtime.thread_devices import run_together

Watch = Callable[[BucketState], None]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The results of every step, and the parameters after the last one."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    parts: tuple[Mapping[int, float], ...]  # the loss of each microbatch of all replicas, by step
    parameters: Mapping[str, torch.Tensor]
    averages: Mapping[str, torch.Tensor]  # of trained parameters, with `ema`

    def __repr__(self) -> str:
        """Without the values of all parameters, which would fill a notebook."""
        losses = ", ".join(f"{loss:.5f}" for loss in self.losses)
        count = sum(one.numel() for one in self.parameters.values())
        return f"Rehearsal(losses=[{losses}], parameters={count:,} elements)"


@names_options
def rehearse(
    model: torch.nn.Module,
    loss_fn: Loss | None,
    strategy: Strategy | Sequence[Any] | None,
    batches: Sequence[Any],
    *,
    optimizer: MakeOptimizer = ADAMW,
    lr_scheduler: MakeScheduler | None = None,
    no_decay: Sequence[str] = (),
    reduction: Literal["mean", "sum"] | None = None,
    loss_weight: Callable[..., Any] | None = None,
    max_norm: float | None = None,
    ema: float | None = None,
    on_nan: OnNan | None = None,
    precision: Precision | str | None = None,
    compiled: bool = False,
    graphs: GraphsOption = False,
    seed: int = 0,
    init: Init | None = None,
    costs: Costs | str | Path | None = None,
    memory_gib: float | None = None,
    device: str | torch.device = "cpu",
    max_programs: int = 64,
    whole: Sequence[str] | None = None,
    watch: Watch | None = None,
) -> Rehearsal:
    """Train a few steps under a strategy, with all its devices in this process.

    For inspection and tests: it is exact, but threads do not make it fast. Options are those of the
    Trainer; a step that is not finite is skipped if `on_nan` is given. All batches have the same
    shape, and each is that of all replicas together. `watch` is called with every bucket on every
    device after each of its updates; gradients are still there.
    """
    options = Options(
        optimizer=optimizer, lr_scheduler=lr_scheduler, no_decay=no_decay, reduction=reduction,
        loss_weight=loss_weight, max_norm=max_norm, ema=ema, on_nan=on_nan, precision=precision,
        compiled=compiled, graphs=graphs, seed=seed, init=init, costs=costs,
        memory_gib=memory_gib, device=device, max_programs=max_programs,
        whole=whole,
    )  # fmt: skip
    job = Job(model, loss_fn, given_strategy(strategy), options)
    refuse_no_batches("rehearse", batches, model, loss_fn, None)
    found = [job.example(one, f"rehearse, batch {k}") for k, one in enumerate(batches)]
    if not found:
        raise InputError.of("rehearse", "there are no batches", "give at least one batch")
    return rehearsed(job, found, watch)


def rehearsed(job: Job, batches: Sequence[Batch], watch: Watch | None = None) -> Rehearsal:
    """Rehearse a job on batches of all its replicas together."""
    refuse_different(batches)
    batches, captured, compiled = prepared(job, batches)
    plans = compiled.device_plans
    states = {plan.device: DeviceState(job.device) for plan in plans}
    parts = {one.plan.device: one for one in assignments(captured, compiled)}

    def ready(plan: Plan, comm: Comm) -> Program:
        program = load(job, parts[plan.device], captured.kernels, states[plan.device], comm)
        own = joins(parts[plan.device], captured.kernels, job.options.compiled)
        program.faster = join_runs(program, own)
        if watch is not None:
            program.watch = watch  # type: ignore[method-assign,assignment]
        return program

    steps = [step_inputs(job, captured, number, batch) for number, batch in enumerate(batches)]
    seen: list[list[tuple[torch.Tensor, dict[int, float]]]] = [[] for _ in steps]
    record = partial(remember, seen)
    feeds = [job.feeds.feed(plan.device) for plan in plans]
    run_together(
        compiled.device_plans, ready, [[step[feed] for step in steps] for feed in feeds], record
    )

    def collected() -> dict[str, torch.Tensor]:
        owned = [states[device].parts(one.reported_states) for device, one in parts.items()]
        return assembled(part for found in owned for part in found)

    parameters, averages = collected(), dict[str, torch.Tensor]()
    if job.options.ema is not None:
        for state in states.values():
            swap(state)
        averages = collected()
    return Rehearsal(
        losses=tuple(rows[0][0][0].item() for rows in seen),
        grad_norms=tuple(rows[0][0][1].item() ** 0.5 for rows in seen),
        parts=tuple({k: v for _, losses in rows for k, v in losses.items()} for rows in seen),
        parameters=parameters,
        averages=averages,
    )


def prepared(job: Job, batches: Sequence[Batch]) -> tuple[list[Batch], Captured, Compiled]:
    with looking_once():
        whole = job.judged(batches[0], job.all_microbatches).whole
        batches = [replace(batch, whole=whole) for batch in batches]
        if not job.rows.unequal:
            refuse_uneven(batches[0], job.replicas, job.all_microbatches)
        own = job.rows.divided(batches[0])[0]
        running = job.first_inputs.running(job.model, job.loss_fn, batches[0])
        with running, job.failing_on_parts(batches[0], own):
            captured, compiled = job.compile(own, by_role=True)
    for batch in batches:
        refuse_asked(batch.tensors, captured.visit.asked)
        job.python_state.refuse_attributes(batch.tensors)
    if job.all_microbatches > 1:
        job.whole_inputs.refuse_unclear(batches[0], captured, job.precision)
    return batches, captured, compiled


def step_inputs(job: Job, captured: Captured, step: int, batch: Batch) -> list[StepInputs]:
    """The inputs of each replica for one step."""
    parts, reduction = job.rows.divided(batch), job.reduction(captured.form)
    weights = [job.weights(reduction, part) for part in parts]
    everyone = sum(map(sum, weights))
    refuse_weightless(everyone)
    return [
        job.inputs(part, reduction.shares(own, everyone), step, feed)
        for feed, (part, own) in enumerate(zip(parts, weights, strict=True))
    ]


def refuse_different(batches: Sequence[Batch]) -> None:
    for number, batch in enumerate(batches):
        if batch.shapes != batches[0].shapes:
            raise InputError.of(
                f"batch {number}",
                "its shapes or numbers differ from those of the first one",
                "rehearse batches of one shape, with the same numbers among their inputs",
            )


def remember(seen: list[list[Any]], number: int, program: Program) -> None:
    first = program.batch.first
    losses = {first + part: loss.item() for part, loss in program.losses.items()}
    tell_of_lost(program.totals[0].item(), losses)
    seen[number].append((program.totals.clone(), losses))
    advance(program.state)
