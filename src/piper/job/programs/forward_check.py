"""Does the forward still call what was captured? Python code may read what Piper does not watch.

What Piper knows of (attributes, globals, files, settings) is compared in every step. For all else,
the forward runs again on tensors without values: in the first steps, from time to time, and before
what was trained is used.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from piper.capture import Captured
from piper.capture.modes_private import unobserved
from piper.capture.python_state.function_caches import forgetting
from piper.capture.torch_private import fake_errors_unlogged
from piper.capture.trace.row_calls.recorded_calls import RecordedCall
from piper.capture.trace.row_calls.unvalued_run import calls_of
from piper.errors import InputError, first_line
from piper.job.batch.batch import Batch
from piper.job.job import BatchKind, Job
from piper.job.loop.forward_prints import prints_shown_once
from piper.job.processes.consistency import flags

LOG = logging.getLogger("piper")
ALWAYS = 2  # steps at first in which it runs again
AGAIN = 3  # times, before a difference is an error
SHARE = 100  # later, training takes so many times as long


@dataclass
class ForwardCheck:
    """What the forward called when it was captured, for each kind of batch.

    Only the process that captures checks, as what a program reads is the same in all of them.
    """

    clock: Callable[[], float] = time.perf_counter
    known: dict[BatchKind, tuple[Captured, list[RecordedCall]]] = field(default_factory=dict)
    sizes: list[object] = field(default_factory=list)  # of the tensors of the model, and types
    checks: int = 0
    due: float = 0.0  # when the next one is
    unchecked: tuple[Job, BatchKind] | None = None  # the last step, if nothing was checked since

    def remember(self, job: Job, batch: Batch, kind: BatchKind) -> None:
        """Right after a capture, before the loop can change anything."""
        captured = job.captured(batch)
        if captured is None:
            return
        self.sizes = sizes_of(job.model)
        try:
            self.known[kind] = captured, called(job, captured)
        except Exception as error:  # it needs values
            LOG.info("the forward is not run again to be compared: %s", first_line(error))

    def step(self, job: Job, kind: BatchKind) -> None:
        """Before a step of this kind."""
        if kind not in self.known:
            return
        if self.checks < ALWAYS or self.clock() >= self.due:
            self.check(job, kind)
        else:
            self.unchecked = job, kind

    def settle(self) -> None:
        """Before what was trained is used."""
        if self.unchecked is None:
            return
        job, kind = self.unchecked
        if kind in self.known and job.python_state.now() == kind[2] and flags(job.model) == kind[1]:
            self.check(job, kind)

    def check(self, job: Job, kind: BatchKind) -> None:
        since, self.unchecked, started = self.unchecked, None, self.clock()
        if self.sizes != sizes_of(job.model):
            self.known.clear()  # a program has given its memory back, or converted it: its own copy
            return
        captured, before = self.known[kind]
        try:
            now = called(job, captured)
        except Exception as error:
            raise changed(f"raises {type(error).__name__}: {first_line(error)}", since) from None
        self.checks += 1
        self.due = self.clock() + SHARE * (self.clock() - started)
        what = difference(before, now)
        if what is not None and is_steady(now, lambda: called(job, captured), before):
            raise changed(what, since)


def is_steady(
    now: Sequence[RecordedCall],
    call: Callable[[], Sequence[RecordedCall]],
    before: Sequence[RecordedCall],
) -> bool:
    """Whether it calls that again. A set of objects has another order in each copy of the model."""
    for _ in range(AGAIN):
        again = call()
        if difference(now, again) is not None or difference(before, again) is None:
            return False
    return True


def sizes_of(model: torch.nn.Module) -> list[object]:
    with unobserved():
        return [(one.shape, one.dtype) for one in (*model.parameters(), *model.buffers())]


@forgetting()
@prints_shown_once()
def called(job: Job, captured: Captured) -> list[RecordedCall]:
    """What the model and its loss call for a microbatch, now. Modes that count see none of it."""
    with (
        unobserved(),
        torch.enable_grad(),
        fake_errors_unlogged(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the trace gave them
        return calls_of(job.model, job.loss_fn, captured.inputs, captured.device, job.precision)


def difference(before: Sequence[RecordedCall], now: Sequence[RecordedCall]) -> str | None:
    """The first call that is another one, in words."""
    for old, new in zip(before, now, strict=False):
        if outline(old) != outline(new):
            return f"calls {new.name}{how(old, new)}{at(new)}"
    if len(now) > len(before):
        return f"also calls {now[len(before)].name}{at(now[len(before)])}"
    if len(now) < len(before):
        return f"no longer calls {before[len(now)].name}{at(before[len(now)])}"
    return None


def how(old: RecordedCall, new: RecordedCall) -> str:
    if old.name != new.name:
        return f" in place of {old.name}"
    if repr(old.numbers) == repr(new.numbers):
        return " with other inputs, sizes or types"
    return f" with {numbers(new)} in place of {numbers(old)}"


def at(call: RecordedCall) -> str:
    return f" at {call.line}" if call.line else ""


def outline(call: RecordedCall) -> tuple[object, ...]:
    """What is compared of a call. Numbers by their text: nan is nan."""
    how = call.function, call.given, call.sizes, call.gradients, call.in_loss
    return *how, repr(call.numbers)


def numbers(call: RecordedCall) -> str:
    return ", ".join(f"{one:g}" for one in call.numbers) or "none"


def changed(what: str, since: object) -> InputError:
    trained = "; steps since the last check may have trained as before" if since else ""
    return InputError.of(
        "model",
        f"its forward or loss now {what}, and not what was captured: it reads something that has "
        f"changed, which Piper does not watch{trained}",
        "keep what changes in an attribute of the model or in a global, or pass it to the model "
        "with the batch, as a tensor",
    )
