"""Jobs for workers: train with some steps recorded, and without."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from replicas import ADAMW, batches, digests, known
from shared_capture import using

from piper.directives import Place, Strategy
from piper.ir.placement.replicas import replicas
from piper.job.loop.tracing import Recording
from piper.launcher.trace_window import Window
from piper.plan.analyse.trace import Trace
from piper.plan.instructions import Plan
from piper.runtime.observe.clocks import Offset, offset_to_first
from piper.trainer import Trainer


@dataclass
class Seen:
    """The results of one device: losses and the bits of its parameters; device 0 has the traces."""

    losses: list[float]
    bits: dict[str, str]
    plan: Plan
    doubt: float  # error bound of its clock, in seconds
    traces: list[Trace] = field(default_factory=list)


def trainer_of(rank: int, name: str, stages: int, rows: int, text: str) -> tuple[Trainer, list]:
    strategy = Strategy.from_json(text)
    feeds = replicas(d.devices for d in strategy if isinstance(d, Place))
    parts = strategy.microbatches * sum(map(len, feeds.feeds))
    model, loss_fn, found = known(rank, name, stages, rows // parts)
    mine = [tuple(t.chunk(len(feeds.feeds))[feeds.feed(rank)] for t in batch)
            for batch in batches(name, rows)]  # fmt: skip
    with using(found):
        trainer = Trainer(model, loss_fn, strategy, optimizer=ADAMW, example=mine[0], max_norm=1.0)
    return trainer, mine


def train(
    rank: int, name: str, stages: int, rows: int, text: str, path: str | None, ahead: int = 0
) -> Seen:
    """The last two of three steps recorded, if there is a path; this clock may be ahead."""
    trainer, mine = trainer_of(rank, name, stages, rows, text)
    if path is not None:
        clock = lambda: time.perf_counter_ns() + ahead * rank  # noqa: E731
        trainer._recording = Recording(Window(Path(path), first=2, count=2), clock)
    losses = [trainer.step(*batch).loss for batch in mine]
    (program,) = trainer._programs.ready.values()
    doubt = trainer._recording.offset.doubt / 1e9
    seen = Seen(losses, digests(trainer), program.plan, doubt, trainer._recording.traces)
    trainer.close()
    return seen


def profile(rank: int, name: str, stages: int, rows: int, text: str, path: str) -> Plan:
    """One step with torch's profiler."""
    trainer, mine = trainer_of(rank, name, stages, rows, text)
    trainer.record(path, steps=1, profile=True)
    trainer.step(*mine[0])
    (program,) = trainer._programs.ready.values()
    trainer.close()
    return program.plan


def offsets(rank: int, ahead: int) -> Offset:
    dist.barrier()
    return offset_to_first(lambda: time.perf_counter_ns() + ahead * rank)
