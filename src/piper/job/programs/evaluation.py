"""Evaluate a model, and predict with it, under the strategy that trains it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from piper.capture.trace.arguments.outputs import separated
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.loss.loss_reduction import LossReduction, reduction_of_batches, refuse_weightless
from piper.job.processes import consistency
from piper.job.processes.consistency import Agreed
from piper.job.programs.forward_programs import ForwardPrograms
from piper.runtime.comm.gathering import gather
from piper.runtime.comm.world import world
from piper.runtime.execute import Program
from piper.runtime.gpu.stream_shares import on_compute_stream
from piper.runtime.metrics import rate_text

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss of all batches, and what it took."""

    loss: float
    batches: int  # of each replica
    samples: int  # of all replicas
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

    def add(self, total: torch.Tensor, weight: float, batch: Batch) -> None:
        self.sums.append(total)
        self.weight += weight
        samples, tokens = self.job.rows.sizes(batch, self.feed)
        self.samples += samples
        self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens

    def result(self) -> Evaluation:
        if not self.sums:
            raise InputError.of("evaluate", "there are no batches", "give at least one batch")
        refuse_weightless(self.weight)
        assert self.reduction is not None
        loss = float(torch.stack(self.sums).sum()) / self.reduction.whole(self.weight)
        seconds = time.perf_counter() - self.started
        return Evaluation(loss, len(self.sums), self.samples, self.tokens, seconds)


def evaluated(forwards: ForwardPrograms, batches: Iterable[Batch], move: Move) -> Evaluation:
    """The loss of all batches of all replicas together."""
    job = forwards.job
    total = LossSum(job, job.feeds.feed(forwards.rank))
    for batch in batches:
        with in_eval_mode(job.model):
            here = forwards.job_for(batch)
            if not forwards.has(batch, "loss"):
                agreed_weight(here, forwards.rank, batch, 0.0)  # before processes compile together
            program, here = forwards.get(batch, "loss")
            batch = here.whole_inputs.marked(batch)
            total.reduction = reduction = reduction_for(forwards, batch)
            weights = microbatch_weights(here, reduction, batch)
            everyone = agreed_weight(here, forwards.rank, batch, sum(weights))
            run(program, here, forwards.rank, batch, reduction.factors(weights), move)
            total.add(program.totals[0], everyone, batch)
    consistency.agree_on_call(consistency.NO_MORE_BATCHES, job.replicas)
    return total.result()


def predicted(forwards: ForwardPrograms, batch: Batch, move: Move) -> Any:
    """The outputs for the batches of all replicas, on device 0. The others get None."""
    with in_eval_mode(forwards.job.model):
        feed = forwards.job.feeds.feed(forwards.rank)
        agreed_weight(forwards.job_for(batch), forwards.rank, batch, 1.0)
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
    return separated(forwards.outputs[kind], parts, job.rows.of_all_microbatches(batch, feed))


def run(
    program: Program, job: Job, rank: int, batch: Batch, factors: list[float], move: Move
) -> None:
    feed = job.feeds.feed(rank)
    inputs = job.inputs(batch, factors, 0, feed, move)
    with on_compute_stream(program.plan, program.device):
        program.step(inputs)


def reduction_for(forwards: ForwardPrograms, batch: Batch) -> LossReduction:
    options, form = forwards.job.options, forwards.forms[forwards.kind(batch)]
    return reduction_of_batches(options.reduction, options.loss_weight, form)


def microbatch_weights(job: Job, reduction: LossReduction, batch: Batch) -> list[float]:
    """In a plain mean, every row counts the same, also in a smaller last batch."""
    found = reduction.weights(batch, job.microbatches)
    if not reduction.is_plain_mean:
        return found
    return [weight * rows_of(batch) / len(found) for weight in found]


def agreed_weight(job: Job, rank: int, batch: Batch, own: float) -> float:
    """The total weight of all replicas. Checks that all processes have such a batch."""
    if world() == 1:
        return own * job.replicas
    data = () if any(one.is_cuda for one in batch.tensors) else batch.tensors
    feed = job.feeds.feed(rank)
    *kind, state = job.kind(batch, feed)
    mine = Agreed(own, state=state)
    found = consistency.agree_on_step(tuple(kind), data, feed, job.replicas, mine)
    job.python_state.agreed = found.state
    return found.weight


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
