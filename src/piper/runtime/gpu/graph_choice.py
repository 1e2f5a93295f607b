"""`graphs="auto"`: a few steps without CUDA graphs, a few with them, then whichever is faster.

Every device decides by itself. Messages are the same either way, so devices need not agree, and a
step takes about as long on each of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from piper.runtime.batch import StepInputs
from piper.runtime.execute import Act, Faster, Program

LOG = logging.getLogger("piper")
UNTIMED = 1  # steps of each kind before its times count: memory is allocated, clocks rise
TIMED = 4  # steps of each kind
GAIN = 0.98  # graphs hold memory between steps, so they must be worth it


@dataclass
class GraphChoice:
    """What a step runs, until the choice is made and afterwards."""

    program: Program
    plain: Faster | None  # None: one function per instruction
    record: Callable[[], Faster]
    clock: Callable[[], float]
    graphs: Faster | None = None
    chosen: bool = False
    times: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        if self.chosen:
            return self.acts(self.graphs, batch)
        if self.graphs is None and self.is_known(False):
            self.try_recording()
        if self.is_known(True):
            self.choose()
        if self.chosen:
            return self.acts(self.graphs, batch)
        return self.measured(self.acts(self.graphs, batch), self.graphs is not None)

    def acts(self, faster: Faster | None, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        faster = faster or self.plain
        return list(enumerate(self.program.acts)) if faster is None else faster.begin(batch)

    def is_known(self, graphs: bool) -> bool:
        return len(self.times[graphs]) == UNTIMED + TIMED

    def measured(self, acts: Sequence[tuple[int, Act]], graphs: bool) -> Sequence[tuple[int, Act]]:
        """The same functions, and one that notes how long they took."""
        began = self.clock()

        def end() -> None:
            self.program.finish()  # no message is in flight then
            self.times[graphs].append(self.clock() - began)

        return [*acts, (len(self.program.plan.instructions) - 1, end)]

    def try_recording(self) -> None:
        """Between two steps. Without enough memory for graphs, there are none."""
        forget_values(self.program)
        try:
            self.graphs = self.record()
        except torch.OutOfMemoryError:
            self.chosen = True
            empty_cache(self.program.device)
            LOG.info("device %d: no CUDA graphs, which do not fit", self.program.plan.device)

    def choose(self) -> None:
        without, with_graphs = (median(self.times[kind][UNTIMED:]) for kind in (False, True))
        faster = with_graphs < GAIN * without
        self.chosen = True
        if not faster:
            self.graphs = None
            empty_cache(self.program.device)
        LOG.info(
            "device %d: a step takes %.1f ms with CUDA graphs and %.1f ms without; it runs %s",
            self.program.plan.device, 1e3 * with_graphs, 1e3 * without,
            "with them" if faster else "without",
        )  # fmt: skip


def forget_values(program: Program) -> None:
    """What a step has left behind. States stay."""
    states = {program.slot(state.value) for state in program.plan.states}
    program.slots[:] = [held if k in states else None for k, held in enumerate(program.slots)]


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_clock() -> float:
    """The time once all kernels are done."""
    torch.cuda.synchronize()
    return time.perf_counter()
