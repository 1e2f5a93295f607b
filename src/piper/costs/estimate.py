"""What a region takes by its FLOPs, bytes and operators."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from piper.costs.modes import Mode
from piper.ir.model import Model, Region
from piper.ir.values import TensorSpec
from piper.names import BI, BW, B, F, Phase

UNITS = {F: 1.0, B: 2.0, BI: 1.0, BW: 1.0}  # where nothing is known, not even FLOPs


@dataclass(frozen=True, slots=True)
class Work:
    """What one phase of a region does on one microbatch."""

    flops: float
    touched: float  # bytes that go in and out of the region, parameters among them
    traffic: float | None = None  # bytes that operators without arithmetic move, if counted
    operators: int = 0
    fused_traffic: float | None = None  # the same, if a compiler fuses operators
    fused_operators: int = 0

    def in_mode(self, mode: Mode) -> tuple[float | None, int]:
        """Bytes that operators without arithmetic move, and how many operators there are."""
        if mode.is_compiled and self.fused_traffic is not None:
            return self.fused_traffic, self.fused_operators
        return self.traffic, self.operators


@dataclass(frozen=True)
class Rates:
    """How fast a device works. The defaults are those of one slow core."""

    flops: float = 2e10  # per second
    memory: float = 4e9  # bytes per second, of reading inputs and writing results
    start: float = 0.0  # seconds of an operator of a region, besides its work
    launch: float = 0.0  # of the host, to start an operator; it runs while others are started
    fused: float = 1.0  # times these two, of an operator that a compiler made of several
    ahead: bool = False  # the host only queues work (GPU) instead of doing it (CPU)

    def estimate(self, work: Work | None, phase: Phase, mode: Mode = Mode.EAGER) -> float:
        """Seconds. On an accelerator, moving bytes is most of what small operators do, so bytes
        are counted operator by operator there. CUDA graphs need no host to launch operators."""
        if work is None:
            return UNITS[phase]
        return max(self.of_device(work, mode), self.of_host(work, mode))

    def of_device(self, work: Work, mode: Mode) -> float:
        traffic, _ = work.in_mode(mode)
        moved = traffic if self.ahead and traffic is not None else work.touched
        starts = self.start * self.started(work, mode)
        return work.flops / self.flops + moved / self.memory + starts

    def of_host(self, work: Work, mode: Mode) -> float:
        """Seconds to launch the operators."""
        return 0.0 if mode.has_graphs else self.launch * self.started(work, mode)

    def started(self, work: Work, mode: Mode) -> float:
        """Operators. One that a compiler made of several counts as some."""
        return work.in_mode(mode)[1] * (self.fused if mode.is_compiled else 1.0)


def work_of(model: Model, region: Region, phase: Phase) -> Work | None:
    """None if its FLOPs were not counted."""
    if phase not in region.flops:
        return None
    touched = sum(model.values[value].nbytes for value in (*region.inputs, *region.outputs))
    touched += sum(spec.nbytes for spec in weights(model, region))
    operators = region.operators.get(phase, 0)
    fused = region.fused.get(phase, (None, 0))
    return Work(region.flops[phase], touched, region.traffic.get(phase), operators, *fused)


def structure_of(model: Model, region: Region) -> str:
    """Equal for regions with the same parameters, also of microbatches of other sizes."""
    shapes = "; ".join(f"{spec.dtype} {spec.shape}" for spec in weights(model, region))
    return sha256(shapes.encode()).hexdigest()[:12]


def weights(model: Model, region: Region) -> list[TensorSpec]:
    return [spec for bucket in region.buckets for spec in model.buckets[bucket].specs]
