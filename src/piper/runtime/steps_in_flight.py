"""How long steps take, and how many may be in flight at once."""

from __future__ import annotations

import atexit
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from math import isfinite

import torch

from piper.runtime.execute import Program
from piper.runtime.hardware import peak_gib
from piper.runtime.metrics import Readings

LOG = logging.getLogger("piper")
LOST = (
    "the loss of microbatch %d is not finite, and those of others are, so the loss of the step is "
    "not finite, either. Where nothing of a microbatch counts, as without labels, divide by at "
    "least 1 in your loss (`.clamp(min=1)`); one microbatch gives the loss of the whole batch"
)
MOST = 2  # steps that the host may run ahead of a GPU


class HostSteps:
    """Steps on the CPU. A step is over when it returns."""

    over = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.started = device, 0.0

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def begin(self) -> None:
        self.started = time.perf_counter()

    def end(self, program: Program) -> Callable[[], Readings]:
        found = readings(program.totals, program.losses, is_watched(program))
        seconds = time.perf_counter() - self.started
        read = Readings(*found[:2], seconds, peak_gib(self.device), found[2])
        return lambda: read

    def finish(self) -> None:
        """Between steps, nothing is in flight."""

    def forget(self) -> None:
        """There is nothing to wait for."""


class CudaSteps:
    """Steps on a GPU. The host goes on until it is two steps ahead."""

    over = False  # when `end` returns

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        self.ends: deque[torch.cuda.Event] = deque()
        atexit.register(self.finish)  # peers may still need messages of this process

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU. The host waits for this copy only, and may then reuse the memory."""
        if tensor.device.type != "cpu":
            return tensor.to(self.device)
        with torch.cuda.stream(self.side):
            copy = tensor.to(self.device, non_blocking=True)
        self.side.synchronize()
        copy.record_stream(torch.cuda.current_stream())
        return copy

    def begin(self) -> None:
        while len(self.ends) >= MOST:
            self.ends.popleft().synchronize()
        self.start = torch.cuda.Event(enable_timing=True)
        self.start.record()

    def end(self, program: Program) -> Callable[[], Readings]:
        start, over = self.start, torch.cuda.Event(enable_timing=True)
        over.record()
        self.ends.append(over)
        totals, losses, watched = program.totals, program.losses, is_watched(program)

        def read() -> Readings:
            """On its own stream: the next step may already be queued on the others."""
            over.synchronize()
            with torch.cuda.stream(self.side):
                loss, norm, parts = readings(totals, losses, watched)
            seconds = start.elapsed_time(over) / 1e3
            return Readings(loss, norm, seconds, peak_gib(self.device), parts)

        return read

    def finish(self) -> None:
        """Wait until all steps are over."""
        while self.ends:
            self.ends.popleft().synchronize()

    def forget(self) -> None:
        """After a step failed, the others may never end: do not wait for them."""
        self.ends.clear()


def is_watched(program: Program) -> bool:
    """Whether `on_nan` says what is not finite."""
    return program.batch.only_finite


def readings(
    totals: torch.Tensor, losses: dict[int, torch.Tensor], watched: bool
) -> tuple[float, float, dict[int, float]]:
    loss, squares = totals.tolist()
    parts = torch.stack(list(losses.values())).tolist() if losses else []
    found = dict(zip(losses, parts, strict=True))
    if not watched:
        tell_of_lost(loss, found)
    return loss, squares**0.5, found


def tell_of_lost(loss: float, parts: Mapping[int, float]) -> None:
    """The loss of a whole batch may be a number where that of a microbatch is none."""
    lost = [number for number, one in parts.items() if not isfinite(one)]
    if not isfinite(loss) and 0 < len(lost) < len(parts):
        warn_of_lost(lost[0])


@cache
def warn_of_lost(number: int) -> None:
    LOG.warning(LOST, number)


def steps_on(device: torch.device) -> HostSteps | CudaSteps:
    return CudaSteps(device) if device.type == "cuda" else HostSteps(device)
