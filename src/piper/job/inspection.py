"""Inspect what a script would train: its Trainer compiles, and raises the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from piper.capture import Captured
from piper.costs import Costs
from piper.job.batch.batch import Batch
from piper.job.compile.compiler import Compiled
from piper.job.inspecting import looking
from piper.job.job import Job

MANY = 64  # devices; above that, tools compile one device per role
_replaced: dict[str, Any] = {}  # options


class Inspected(BaseException):
    """Raised instead of training, for tools. Nothing was started."""

    def __init__(self, job: Job, example: Batch, captured: Captured, compiled: Compiled) -> None:
        super().__init__("inspected")
        self.job, self.example, self.captured, self.compiled = job, example, captured, compiled


def inspected(job: Job, example: Batch) -> Inspected:
    if _replaced:
        job = replace(job, options=replace(job.options, **_replaced))
    by_role = len(job.feeds.devices) > MANY
    with job.first_inputs.running(job.model, job.loss_fn, example):
        captured, compiled = job.compile(example, by_role=by_role)
    return Inspected(job, job.whole_inputs.marked(example), captured, compiled)


@contextmanager
def inspecting(memory_gib: float | None = None, costs: Costs | str | None = None) -> Iterator[None]:
    """Inside, the first Trainer compiles and raises `Inspected`.

    What is given here replaces the options of the Trainer.
    """
    global _replaced
    given = {"memory_gib": memory_gib, "costs": costs}
    _replaced = {name: one for name, one in given.items() if one is not None}
    try:
        with looking():
            yield
    finally:
        _replaced = {}
