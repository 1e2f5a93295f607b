"""Trainings in which one process is slow: in a region, in its loader, or nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from small_training import Net, data
from torch import nn

import piper
from piper.plan.instructions import Run
from piper.runtime.metrics import Slowest
from piper.runtime.observe.gpu_time import GpuTime
from piper.strategies import one_f_one_b

SLEEP = 0.05  # seconds in each step; a busy host must not be slower by chance


def train_slowly(
    rank: int, slow: int, where: str, steps: int, sleep: float = SLEEP, marks: bool = False
) -> list[tuple[object, ...]]:
    """What each process knows of the slowest one after so many steps.

    With `marks`, times are measured as on a GPU, but on the host.
    """
    strategy = one_f_one_b(pp=1, dp=2, microbatches=2)
    batches = data(steps + 1)
    trainer = piper.Trainer(Net(), nn.functional.mse_loss, strategy, example=batches[0])
    if marks:
        trainer._slow.own = GpuTime(Mark)
    if rank == slow and where not in ("", "loader"):
        (program,) = trainer._programs.ready.values()
        program.faster = None  # the functions below run, instead of joined ones
        for k, one in enumerate(program.plan.instructions):
            if isinstance(one, Run) and f"{one.region}:{one.phase}" == where:
                program.acts[k] = slowly(program.acts[k], sleep / 2)  # of two microbatches
    found: Slowest | None = None
    began = time.perf_counter()
    for inputs, labels in batches[1:]:
        if rank == slow and where == "loader":
            time.sleep(sleep)
        found = trainer.step(inputs + rank, labels).slowest
    took = (time.perf_counter() - began) / steps
    trainer.close()
    return (found.device, found.where, found.lost, took) if found else (None, "", 0.0, took)


class Mark:
    """An event of a device that has done all its work when it is recorded."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end_event: Mark) -> float:
        return 1e3 * (end_event.at - self.at)

    def synchronize(self) -> None: ...


def slowly(act: Callable[[], None], seconds: float) -> Callable[[], None]:
    def slow() -> None:
        time.sleep(seconds)
        act()

    return slow


torch.set_num_threads(1)
