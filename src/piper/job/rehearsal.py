"""Try a strategy out in one process: every device is a thread, nothing has to be started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piper.capture import Captured
from piper.errors import InputError, Problem
from piper.job.assignment import assignments
from piper.plan.instructions import Plan
from piper.runtime.batch import (
    Batch,
    microbatch,
    refuse_uneven,
    refuse_weightless,
    shape_key,
)
from piper.runtime.comm.gloo import Comm
from piper.runtime.execute import Program
from piper.runtime.state.device_state import BucketState, DeviceState, assembled
from piper.runtime.thread_devices import run_together
from piper.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What every step gave, and the parameters after the last one."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    parts: tuple[Mapping[int, float], ...]  # the loss of each microbatch of all replicas, by step
    parameters: Mapping[str, torch.Tensor]


def rehearse(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    strategy: Sequence[Any],
    batches: Sequence[tuple[Any, ...]],
    captured: Captured | None = None,
    watch: Callable[[BucketState], None] | None = None,
    **options: Any,
) -> Rehearsal:
    """Train a few steps under a strategy, with all its devices in this process.

    For looking and testing: it is exact, but threads do not make it fast. `options` are those of
    the Trainer. Every batch has the same shape, and is that of all replicas together. `watch` sees
    every bucket on every device after each of its updates, gradients included.
    """
    trainer = Trainer.__new__(Trainer)
    trainer.configure(model, loss_fn, strategy, captured=captured, **{"device": "cpu", **options})
    refuse_different(batches)
    refuse_uneven(batches[0], trainer.parts * trainer.replicas)
    found, compiled = trainer.compile(microbatch(batches[0], 0, trainer.replicas))
    states = {plan.device: DeviceState(trainer.device) for plan in compiled.plans}
    parts = {one.plan.device: one for one in assignments(found, compiled)}

    def load(plan: Plan, comm: Comm) -> Program:
        mine, state = parts[plan.device], states[plan.device]
        program = trainer.load(mine, found.kernels, state, comm)
        if watch is not None:
            program.watch = watch  # type: ignore[method-assign,assignment]
        return program

    steps = [fed(trainer, number, batch) for number, batch in enumerate(batches)]
    seen: list[list[tuple[torch.Tensor, dict[int, float]]]] = [[] for _ in steps]
    record = partial(remember, seen)
    feeds = [trainer.feeds.feed(plan.device) for plan in compiled.plans]
    run_together(compiled.plans, load, [[step[feed] for step in steps] for feed in feeds], record)
    parameters = assembled(part for state in reversed(states.values()) for part in state.parts())
    return Rehearsal(
        losses=tuple(rows[0][0][0].item() for rows in seen),
        grad_norms=tuple(rows[0][0][1].item() ** 0.5 for rows in seen),
        parts=tuple({k: v for _, losses in rows for k, v in losses.items()} for rows in seen),
        parameters=parameters,
    )


def fed(trainer: Trainer, step: int, batch: tuple[Any, ...]) -> list[Batch]:
    """What each feed gets of a batch."""
    count = trainer.replicas
    parts = [microbatch(batch, k, count) for k in range(count)]
    weights = [trainer.own_weights(part) for part in parts]
    everyone = sum(map(sum, weights))
    refuse_weightless(everyone)
    return [
        trainer.batch(part, step, k, own, everyone)
        for k, (part, own) in enumerate(zip(parts, weights, strict=True))
    ]


def refuse_different(batches: Sequence[tuple[Any, ...]]) -> None:
    for number, batch in enumerate(batches):
        if shape_key(batch) != shape_key(batches[0]):
            raise InputError(
                f"batch {number}",
                Problem(
                    "it has other shapes or numbers than the first one",
                    "rehearse batches of one shape, with the same numbers among their inputs",
                ),
            )


def remember(seen: list[list[Any]], number: int, program: Program) -> None:
    first = program.batch.first
    losses = {first + part: loss.item() for part, loss in program.losses.items()}
    seen[number].append((program.totals.clone(), losses))
    program.state.advance()
