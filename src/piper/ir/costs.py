"""How long things take: measured where it was measured, otherwise from FLOPs and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from piper.errors import Problem, StrategyError
from piper.ir.model import Model, Region
from piper.names import BI, BW, B, F, Phase

UNITS = {F: 1.0, B: 2.0, BI: 1.0, BW: 1.0}  # where nothing is known, not even FLOPs


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of compute and of communication on one device.

    They decide how overlap slots are interleaved and how early receives are posted, never what is
    computed; the simulator takes all of them. The defaults are those of one slow core behind an
    ordinary network.
    """

    flops: float = 2e10  # per second
    memory: float = 4e9  # bytes per second, of reading inputs and writing results
    link: float = 1e9  # bytes per second, between any two devices
    latency: float = 1e-4  # of a message
    compute: Mapping[str, float] = field(default_factory=dict)  # "code phase" -> seconds
    streams: Mapping[str, float] = field(default_factory=dict)  # stream -> bytes per second
    add: float = 0.0  # seconds for each byte of a gradient that is added up
    square: float = 0.0  # for each byte of a gradient, for the norm of all
    update: float = 0.0  # for each byte of parameters: the optimizer's step
    each: float = 0.0  # of the host, for each instruction that has no figure of its own
    post: float = 0.0  # of the host, to start a message
    wire: float = 0.0  # of a core, for each byte of a message, at both its ends
    cores: float = 0.0  # that all devices of a node share; 0: each device has its own
    start: float = 0.0  # of an operator of a region, besides its work
    launch: float = 0.0  # of the host, to start an operator; it runs while others are started
    ahead: bool = False  # the host only queues work (GPU) instead of doing it (CPU)

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "link"):
            refuse_number(name, getattr(self, name), least=1e-30)
        for name in (
            "latency",
            "add",
            "square",
            "update",
            "each",
            "post",
            "wire",
            "cores",
            "start",
            "launch",
        ):
            refuse_number(name, getattr(self, name))
        for name, least in (("compute", 0.0), ("streams", 1e-30)):
            for key, value in mapping(name, getattr(self, name)).items():
                refuse_number(f"{name} of {key}", value, least)

    def run(self, model: Model, region: Region, phase: Phase) -> float:
        """One phase of a region on one microbatch."""
        known = self.compute.get(f"{region.code} {phase}")
        if known is not None:
            return known
        if phase not in region.flops:
            return UNITS[phase]
        operators = region.operators.get(phase, 0)
        work = region.flops[phase] / self.flops + self.traffic(model, region, phase) / self.memory
        return max(work + self.start * operators, self.launch * operators)

    def traffic(self, model: Model, region: Region, phase: Phase) -> float:
        """What a region moves besides its arithmetic. On an accelerator that is most of what small
        operators do, so it is counted operator by operator where that is known."""
        known = region.traffic.get(phase) if self.ahead else None
        return touched(model, region) if known is None else known

    def moved(self, nbytes: float, stream: str) -> float:
        """A message of so many bytes."""
        return self.latency + nbytes / self.streams.get(stream, self.link)

    def to_json(self) -> str:
        """
        >>> Costs.from_json(Costs(link=2e9).to_json()).link
        2000000000.0
        """
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Costs:
        try:
            return Costs(**json.loads(text))
        except (AttributeError, TypeError, ValueError) as error:
            raise StrategyError(
                "costs", Problem(f"this is no file of costs: {error}", "write one with `measure`")
            ) from None


def refuse_number(name: str, value: object, least: float = 0.0) -> None:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not least <= value < float("inf"):  # type: ignore[operator]
        raise StrategyError(
            "costs", Problem(f"{name}={value!r}", "write a number of seconds, or of units a second")
        )


def mapping(name: str, found: object) -> Mapping[str, object]:
    if not isinstance(found, Mapping):
        raise StrategyError("costs", Problem(f"{name}={found!r}", "write a mapping of numbers"))
    return found


def touched(model: Model, region: Region) -> int:
    """Bytes that go in and out of a region, parameters among them."""
    values: Iterable[int] = (model.values[v].nbytes for v in (*region.inputs, *region.outputs))
    weights = (spec.nbytes for bucket in region.buckets for spec in model.buckets[bucket].specs)
    return sum(values) + sum(weights)
