"""Evaluate a model, and predict with it, under the strategy that trains it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from piper.capture.trace.arguments.call_arguments import split
from piper.capture.trace.arguments.outputs import separated
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.batch_arguments import refuse_no_batches, takes
from piper.job.batch.call_signatures import refuse_wrong_calls
from piper.job.batch.one_or_many import is_nested, is_numbered
from piper.job.job import Job
from piper.job.loss.loss_reduction import LossReduction, refuse_weightless
from piper.job.processes import consistency
from piper.job.processes.consistency import Agreed
from piper.job.processes.different_lengths import Lengths
from piper.job.programs.forward_programs import ForwardPrograms
from piper.job.programs.step_programs import (
    agreed_step,
    evaluated_reduction,
    evaluation_prepared,
)
from piper.names import amount
from piper.runtime.comm.stream_shares import on_compute_stream
from piper.runtime.execute import Program
from piper.runtime.metrics import rate_text
from piper.runtime.processes.gathering import gather
from piper.runtime.processes.world import world

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss of all batches, and what it took."""

    loss: float
    batches: int  # of all replicas, as samples and tokens are
    samples: int
    tokens: int | None  # None: the batches have no token ids
    seconds: float

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds

    @property
    def perplexity(self) -> float:
        """Of a language model, whose loss is a mean of log-likelihoods."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def __str__(self) -> str:
        return (
            f"loss: {self.loss:.5f}  batches: {self.batches}  samples: {self.samples:,}  "
            f"{rate_text(self.samples, self.tokens, self.seconds)}"
        )


@dataclass
class LossSum:
    """Adds up the losses of batches, each microbatch by its weight."""

    job: Job
    feed: int  # which batches this process is given
    sums: list[torch.Tensor] = field(default_factory=list)  # on the device: nothing waits for it
    reduction: LossReduction | None = None  # known with the first batch
    weight: float = 0.0  # of all microbatches of all replicas
    samples: int = 0
    tokens: int | None = 0
    started: float = field(default_factory=time.perf_counter)

    def add(
        self, total: torch.Tensor, weight: float, batch: Batch, lengths: Lengths | None
    ) -> None:
        self.sums.append(total)
        self.weight += weight
        samples, tokens = lengths.sizes if lengths else self.job.rows.sizes(batch, self.feed)
        self.samples += samples
        self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens

    def result(self) -> Evaluation:
        if not self.sums:
            raise InputError.of("evaluate", "there are no batches", "give at least one batch")
        refuse_weightless(self.weight)
        assert self.reduction is not None
        loss = float(torch.stack(self.sums).sum()) / self.reduction.whole(self.weight)
        seconds = time.perf_counter() - self.started
        batches = len(self.sums) * self.job.replicas
        return Evaluation(loss, batches, self.samples, self.tokens, seconds)


def batches_of(job: Job, given: Iterable[Any], example: Batch) -> Iterator[Batch]:
    """Batches as a loader gives them."""
    refuse_no_batches("evaluate", given, job.model, job.loss_fn, example)
    return (checked(job, one, f"evaluate, batch {k}", example) for k, one in enumerate(given))


def checked(job: Job, batch: Any, where: str, example: Batch) -> Batch:
    if isinstance(batch, tuple | list) and is_numbered(batch) and not is_nested(example):
        what = "it is a number and a batch, as enumerate gives them"
        raise InputError.of(where, what, "write trainer.evaluate(loader), without enumerate")
    return job.example(batch, where)


def evaluated(
    forwards: ForwardPrograms, example: Batch, batches: Iterable[Any], move: Move
) -> Evaluation:
    """The loss of all batches of all replicas together."""
    job = forwards.job
    total = LossSum(job, job.feeds.feed(forwards.rank))
    for batch in batches_of(job, batches, example):
        with in_eval_mode(job.model):
            here, known = forwards.job_for(batch), forwards.has(batch, "loss")
            weights = weights_of(forwards, here, batch) if known else [0.0]
            everyone, lengths = agreed_weight(forwards, here, batch, sum(weights), lengths=True)
            if evaluation_prepared(forwards, batch, lengths):
                batch = here.whole_inputs.marked(batch)
                weights = weights_of(forwards, here, batch)
                everyone, _ = agreed_weight(forwards, here, batch, sum(weights), lengths=True)
            kind = forwards.kind(batch)
            total.reduction = reduction = evaluated_reduction(forwards, kind)
            program = forwards.ready[kind, "loss"]
            run(program, here, forwards.rank, batch, reduction.factors(weights), move)
            total.add(program.totals[0], everyone, batch, lengths)
    consistency.agree_on_call(consistency.NO_MORE_BATCHES, job.replicas)
    return total.result()


def predicted(
    forwards: ForwardPrograms,
    example: Batch,
    given: tuple[Any, ...],
    named: dict[str, Any],
    move: Move,
) -> Any:
    """The outputs for the batches of all replicas, on device 0. The others get None."""
    batch = forwards.job.inputs_only(example, given, named)
    refuse_wrong_inputs(forwards.job.model, batch)
    with in_eval_mode(forwards.job.model):
        feed = forwards.job.feeds.feed(forwards.rank)
        agreed_weight(forwards, forwards.job_for(batch), batch, 1.0, lengths=False)
        program, job = forwards.get(batch, "outputs")
        batch = job.whole_inputs.marked(batch)
        run(program, job, forwards.rank, batch, [0.0] * job.microbatches, move)
        first, kind = program.batch.first, forwards.kind(batch)
    mine = {first + part: one.cpu() for part, one in program.losses.items()}
    everywhere = gather(mine)
    if everywhere is None:
        return None
    found = {part: one for parts in everywhere for part, one in parts.items()}
    parts = [found[part] for part in sorted(found)]
    rows = job.rows.of_all_microbatches(batch, feed)
    return separated(forwards.outputs[kind], parts, rows, forwards.row_dimensions[kind])


def refuse_wrong_inputs(model: torch.nn.Module, batch: Batch) -> None:
    """A batch as `step` takes it has one argument too many. Others may have too few, too."""
    given, named = split(batch.arguments)
    if not takes(model, given, named) and takes(model, given[:-1], named):
        what = f"the model takes {amount(len(given) - 1, 'input')}, and got {len(given)}"
        fix = "leave out the labels: trainer.predict(*inputs); give several batches one by one"
        raise InputError.of("predict", what, fix)
    refuse_wrong_calls(model, None, batch.arguments, "predict", None)


def run(
    program: Program, job: Job, rank: int, batch: Batch, factors: list[float], move: Move
) -> None:
    feed = job.feeds.feed(rank)
    inputs = job.inputs(batch, factors, 0, feed, move)
    with on_compute_stream(program.plan, program.device):
        program.step(inputs)


def weights_of(forwards: ForwardPrograms, job: Job, batch: Batch) -> list[float]:
    return microbatch_weights(job, evaluated_reduction(forwards, forwards.kind(batch)), batch)


def microbatch_weights(job: Job, reduction: LossReduction, batch: Batch) -> list[float]:
    """In a plain mean, every row counts the same, also in a smaller last batch."""
    found = reduction.weights(batch, job.microbatches)
    if not reduction.is_plain_mean:
        return found
    return [weight * rows_of(batch) / len(found) for weight in found]


def agreed_weight(
    forwards: ForwardPrograms, job: Job, batch: Batch, own: float, lengths: bool
) -> tuple[float, Lengths | None]:
    """The total weight of all replicas. Checks that all processes have such a batch.

    With `lengths`, replicas may have different ones, which are returned if they do.
    """
    if world() == 1:
        return own * job.replicas, None
    kind = forwards.kind(batch)
    mine, known = Agreed(own, state=kind[2]), True  # values on a GPU are not compared
    found = agreed_step(job, batch, kind, forwards.feed, mine, known, lengths)
    job.python_state.agreed = found.state
    return found.weight, found.lengths


def rows_of(batch: Batch) -> int:
    return batch.rows or 1


@contextmanager
def in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every module gets its own mode back: some may be frozen in eval mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
