"""How long things take: measured where that was measured, else scaled from it or estimated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from piper.costs.estimate import Rates, structure_of, work_of
from piper.costs.links import Link, Network
from piper.costs.measured import Figures, RegionKey, Scales, Source, from_names, from_rows, to_rows
from piper.costs.modes import Mode
from piper.errors import Problem, StrategyError
from piper.ir.model import Model, Region
from piper.names import Device, Phase


@dataclass(frozen=True, slots=True)
class Host:
    """How devices issue instructions, and what that costs."""

    blocks: bool = False  # waits where an instruction says so, and computes itself
    each: float = 0.0  # seconds of an instruction that has no price of its own
    post: float = 0.0  # seconds to start a message
    cores: float | None = None  # that the devices of a node share; None: each has its own
    wire: float = 0.0  # seconds of a core for each byte, at both ends
    beside: float = 1.0  # times as long that compute takes while messages are in flight


@dataclass(frozen=True)
class Costs(Rates):
    """Seconds of compute and of communication on one kind of device, in one mode.

    They decide how overlap slots are interleaved and how early receives are posted, never what is
    computed; the simulator takes all of them. The defaults are those of one slow core behind an
    ordinary network, where starting something takes no time.
    """

    link: float = 1e9  # bytes per second, between any two devices
    latency: float = 1e-4  # of a message
    host_link: float = 4e9  # bytes per second between a device and its host, in each direction
    figures: Figures = field(default_factory=dict)  # of regions, as far as they were measured
    mode: Mode = Mode.EAGER  # in which regions are to be run
    streams: Mapping[str, float] = field(default_factory=dict)  # stream -> bytes per second
    add: float = 0.0  # seconds for each byte of a gradient that is added up
    square: float = 0.0  # for each byte of a gradient, for the norm of all
    update: float = 0.0  # for each byte of parameters: the optimizer's step
    each: float = 0.0  # of the host, for each instruction that has no figure of its own
    post: float = 0.0  # of the host, to start a message
    wire: float = 0.0  # of a core, for each byte of a message, at both its ends
    cores: float = 0.0  # that all devices of a node share; 0: each device has its own
    beside: float = 1.0  # times as long that compute takes while messages are in flight
    kind: str = ""  # the device whose data sheet says all this, if one does
    kinds: tuple[tuple[tuple[Device, ...], Costs], ...] = ()  # of all devices, if they differ

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise StrategyError.of("costs", f"kind={self.kind!r}", "write the name of a device")
        for name in ("flops", "memory", "link", "host_link"):
            refuse_number(name, getattr(self, name), least=1e-30)
        for name in AT_LEAST_NOTHING:
            refuse_number(name, getattr(self, name))
        refuse_number("beside", self.beside, least=0.1)
        for stream, speed in mapping("streams", self.streams).items():
            refuse_number(f"streams of {stream}", speed, least=1e-30)
        mapping("figures", self.figures)
        for key, one in self.figures.items():
            numbers = asdict(one.work) if one.work else {}
            for name, value in {"seconds": one.seconds, **numbers}.items():
                if value is not None:
                    refuse_number(f"{name} of {key.code} {key.phase}", value)

    def region(self, model: Model, region: Region, phase: Phase) -> float:
        """One phase of a region on one microbatch."""
        return self.look_up(model, region, phase)[0]

    def source(self, model: Model, region: Region, phase: Phase) -> Source:
        """Where that time comes from."""
        return self.look_up(model, region, phase)[1]

    def look_up(self, model: Model, region: Region, phase: Phase) -> tuple[float, Source]:
        key = RegionKey(region.code, phase, self.mode)
        if key in self.figures:
            return self.figures[key].seconds, Source.MEASURED
        work = work_of(model, region, phase)
        if not self.figures:
            return self.estimate(work, phase, self.mode), Source.ESTIMATED
        return self.scales.find(key, work, structure_of(model, region))

    @cached_property
    def scales(self) -> Scales:
        return Scales(self.figures, self)

    def message(self, nbytes: float, stream: str) -> float:
        """A message of so many bytes."""
        return self.latency + self.transit(nbytes, stream)

    def transit(self, nbytes: float, stream: str) -> float:
        """The same without its latency."""
        return nbytes / self.streams.get(stream, self.link)

    def host_copy(self, nbytes: float) -> float:
        """A copy of so many bytes between a device and its host."""
        return nbytes / self.host_link

    def addition(self, nbytes: float) -> float:
        """A gradient of so many bytes is added to another."""
        return self.add * nbytes

    def norm(self, nbytes: float) -> float:
        """What gradients of so many bytes add to the norm of all."""
        return self.square * nbytes

    def optimizer(self, nbytes: float) -> float:
        """A step on parameters of so many bytes."""
        return self.update * nbytes

    @property
    def host(self) -> Host:
        cores = self.cores or None
        return Host(not self.ahead, self.each, self.post, cores, self.wire, self.beside)

    @property
    def words(self) -> str:
        """What they are, for reports.

        >>> one_core().words, Costs(kind="h200").words
        ('estimates for one CPU core per device', 'the data sheet of h200')
        """
        if self.kinds:
            return " and ".join(dict.fromkeys(one.words for _, one in self.kinds))
        if self.figures:
            return "measured costs"
        if self.kind:
            return f"the data sheet of {self.kind}"
        plain = self == one_core(self.mode)
        return "estimates for one CPU core per device" if plain else "the costs that you gave"

    def network(self, devices: int) -> Network:
        """Everything in one node; exchanges were measured apart, stream by stream."""
        link = Link(self.link, self.latency)
        return Network(max(1, devices), link, link, streams=self.streams)

    def in_mode(self, mode: Mode) -> Costs:
        if mode is self.mode and all(one.mode is mode for _, one in self.kinds):
            return self
        kinds = tuple((devices, one.in_mode(mode)) for devices, one in self.kinds)
        return replace(self, mode=mode, kinds=kinds)

    def on(self, device: Device) -> Costs:
        """The costs of a device, which may be of another kind. Those of one kind are one object.

        >>> Costs(kinds=(((0, 1), Costs(kind="h200")), ((2, 3), Costs(kind="a100")))).on(3).kind
        'a100'
        """
        return self.by_device.get(device, self)

    def require(self, devices: Iterable[Device]) -> None:
        """Refuse devices without a kind, where kinds differ."""
        missing = [device for device in devices if self.kinds and device not in self.by_device]
        if missing:
            what = f"the job has device {missing[0]}, which is not listed"
            raise StrategyError.of("costs", what, "list every device: h200:0-3,a100:4-7")

    @cached_property
    def by_device(self) -> dict[Device, Costs]:
        return {device: one for devices, one in self.kinds for device in devices}

    def with_figures(self, more: Figures) -> Costs:
        """Newer figures replace older ones."""
        return replace(self, figures={**self.figures, **more})

    def to_json(self) -> str:
        """
        >>> Costs.from_json(Costs(link=2e9).to_json()).link
        2000000000.0
        """
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_dict(self) -> dict[str, Any]:
        found = asdict(replace(self, figures={}, kinds=()))
        found |= {"figures": to_rows(self.figures)}
        return found | {"kinds": [[devices, one.to_dict()] for devices, one in self.kinds]}

    @staticmethod
    def from_json(text: str) -> Costs:
        """Reads files of older versions, too: what they measured is not scaled to other regions."""
        try:
            return Costs.from_dict(json.loads(text))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            fix = "measure again: `piper simulate train.py --profile costs.json`, or `trainer.tune`"
            problem = Problem(f"this is not a file of costs: {error}", fix)
            raise StrategyError("costs", problem) from None

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Costs:
        found = dict(given)
        old, rows = found.pop("compute", {}), found.pop("figures", ())
        mode, each = Mode(found.pop("mode", Mode.EAGER)), found.pop("kinds", ())
        kinds = tuple((tuple(map(int, devices)), Costs.from_dict(one)) for devices, one in each)
        figures = {**from_names(old), **from_rows(rows)}
        return Costs(**found, mode=mode, figures=figures, kinds=kinds)


AT_LEAST_NOTHING = (
    "latency", "add", "square", "update", "each", "post", "wire", "cores", "start", "launch",
    "fused",
)  # fmt: skip


def one_core(mode: Mode = Mode.EAGER) -> Costs:
    """Where nothing is known of the devices: a core for each, and what it takes to start things.

    Measured in Python of 2026 on a core of a shared server: an operator, an instruction, a message.
    """
    return Costs(mode=mode, start=1.2e-5, each=4e-6, post=2e-5)


def read_costs(costs: Costs | str | Path | None, mode: Mode = Mode.EAGER) -> Costs:
    """Costs, a file of them, or estimates for one core, for regions that are run in a mode."""
    if isinstance(costs, str | Path):
        costs = Costs.from_json(Path(costs).read_text())
    return (costs or one_core()).in_mode(mode)


def refuse_number(name: str, value: object, least: float = 0.0) -> None:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not least <= value < float("inf"):  # type: ignore[operator]
        raise StrategyError.of(
            "costs", f"{name}={value!r}", "write a number of seconds, or of units a second"
        )


def mapping(name: str, found: object) -> Mapping[str, object]:
    if not isinstance(found, Mapping):
        raise StrategyError.of("costs", f"{name}={found!r}", "write a mapping of numbers")
    return found
