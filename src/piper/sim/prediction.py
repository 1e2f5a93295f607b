"""The prediction for a strategy on a machine: step time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from piper.names import Device
from piper.plan.analyse.memory import Peak
from piper.sim.report import Report

StageTags = tuple[tuple[str, int], ...]  # the outermost tag of each stage, such as PP=0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Step time and memory, for one device of each role."""

    report: Report
    peaks: Mapping[Device, Peak]
    alike: Mapping[Device, tuple[Device, ...]]  # devices of the same role, itself included
    samples: int  # per step, of all replicas
    tokens: int | None = None  # None: the batch has no token ids
    memory: float | Mapping[Device, float] | None = None  # bytes of each device, if known
    notes: tuple[str, ...] = ()  # which costs were not measured
    flops: float = 0.0  # of the step, without what is recomputed
    peak_flops: float | None = None  # per second, of all devices together, if known
    stages: Mapping[Device, StageTags] = field(default_factory=dict)  # that a device runs
    layers: Mapping[Device, int] = field(default_factory=dict)  # in these stages
    is_cut: bool = False  # whether stages were cut so that the step is fast, by the same costs

    @property
    def seconds(self) -> float:
        return self.report.seconds

    @property
    def unit(self) -> str:
        """What a step is measured by."""
        return "samples" if self.tokens is None else "tokens"

    @property
    def size(self) -> int:
        """Tokens of a step, or samples if it has no tokens."""
        return self.samples if self.tokens is None else self.tokens

    @property
    def rate(self) -> float:
        """Tokens per second, or samples per second."""
        return self.size / self.seconds if self.seconds else 0.0

    @property
    def device_rate(self) -> float:
        """The rate of one device."""
        return self.rate / sum(map(len, self.alike.values()))

    @property
    def mfu(self) -> float | None:
        """The share of the peak that the model's own operations reach. None: it is not known."""
        if not self.peak_flops or not self.seconds:
            return None
        return self.flops / (self.seconds * self.peak_flops)

    @property
    def peak(self) -> int:
        """Peak bytes of the fullest device."""
        return max(one.total for one in self.peaks.values())

    @property
    def fits(self) -> bool:
        return all(self.use(device) <= 1.0 for device in self.peaks)

    @property
    def fullest(self) -> Device:
        """The device that uses most of its memory; of all, if nobody knows how much there is."""
        return max(self.peaks, key=lambda device: (self.use(device), self.peaks[device].total))

    def room(self, device: Device) -> float | None:
        """The memory of a device, if known."""
        return self.memory[device] if isinstance(self.memory, Mapping) else self.memory

    def use(self, device: Device) -> float:
        """The share of its memory that a device needs; 0 if nobody knows how much there is."""
        room = self.room(device)
        return self.peaks[device].total / room if room else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the critical path."""
        return {
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds if self.seconds else 0.0,
            "tokens_per_second": None if self.tokens is None else self.rate,
            "tokens_per_second_per_device": None if self.tokens is None else self.device_rate,
            "mfu": self.mfu,
            "idle": self.report.idle,
            "bubble": self.report.bubble,
            "exposed": self.report.exposed,
            "uncovered": self.report.uncovered,
            "peak_bytes": self.peak,
            "fits": self.fits,
            "notes": list(self.notes),
            "bounds": [
                {"device": device, "region": region, "what": what, "seconds": seconds}
                for (device, region, what), seconds in self.report.bounds.items()
            ],
            "devices": [
                {**asdict(one), "peak_bytes": self.peaks[one.device].total,
                 "held_bytes": dict(self.peaks[one.device].held),
                 "alike": list(self.alike[one.device])}
                for one in self.report.devices
            ],
        }  # fmt: skip
