"""What devices can do: figures of well-known accelerators, from their data sheets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from piper.costs.costs import Costs
from piper.costs.links import Network
from piper.errors import StrategyError
from piper.ir.model import Model
from piper.names import Device, amount

Kind = TypeVar("Kind")
FASTEST = 1e30  # bytes per second, of messages that take no time
ADAM = 7  # times that an optimizer's step goes over a parameter: reads 4 tensors, writes 3


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of accelerator: what its data sheet promises, and how much of that work gets.

    A region takes its arithmetic at `share` of the peak, the bytes that its operators without
    arithmetic move at `memory_share` of the bandwidth, and `start` for each operator: small ones
    do not fill the device. It never takes less than the host needs to launch all operators.
    """

    name: str
    flops: Mapping[str, float]  # per second, by type, of dense matrix products
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    share: float = 0.65  # of the peak that large matrix products reach
    memory_share: float = 0.8
    host_link: float = 50e9  # bytes per second to and from pinned memory: PCIe 5
    start: float = 4.7e-6  # seconds of an operator besides its work
    launch: float = 24e-6  # seconds of the host to start one: of graphs that PyTorch runs eagerly
    fused: float = 1.6  # times these two, of an operator that Inductor made of several

    def rate(self, dtype: str) -> float:
        """Floating-point operations a second that large products reach; other types are float32."""
        return self.share * self.flops.get(dtype, self.flops["float32"])

    @property
    def moved(self) -> float:
        """Bytes a second that simple operators reach."""
        return self.memory_share * self.bandwidth


HOPPER = {
    "float8_e4m3fn": 1979e12, "bfloat16": 989e12, "float16": 989e12, "float32": 67e12,
    "float64": 67e12,
}  # fmt: skip
AMPERE = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12}

DEVICES: Mapping[str, DeviceKind] = {
    # float32 is that of ordinary units: PyTorch takes tensor cores for it only when asked to
    "h100": DeviceKind("h100", HOPPER, 3.35e12, 80e9),
    "h200": DeviceKind("h200", HOPPER, 4.8e12, 141e9),
    "h800": DeviceKind("h800", {**HOPPER, "float64": 1e12}, 3.35e12, 80e9),
    "a100": DeviceKind("a100", AMPERE, 2.039e12, 80e9, host_link=24e9),
}


def device_kind(name: str) -> DeviceKind:
    """
    >>> device_kind("h200").memory
    141000000000.0
    """
    if name not in DEVICES:
        fix = (
            f"choose one of {', '.join(DEVICES)}, cpu; for another, measure on it with --profile "
            "costs.json, and give --costs costs.json"
        )
        raise StrategyError.of("device", f"there is no device {name!r}", fix)
    return DEVICES[name]


def of_each_device(kinds: Sequence[tuple[Kind, Sequence[Device]]], count: int) -> list[Kind]:
    """What each device of a job is, by its number.

    >>> of_each_device([("h200", (0, 2)), ("a100", (1,))], 3), of_each_device([("h200", ())], 2)
    (['h200', 'a100', 'h200'], ['h200', 'h200'])
    """
    if len(kinds) == 1 and not kinds[0][1]:
        return [kinds[0][0]] * count
    placed = {device: kind for kind, devices in kinds for device in devices}
    missing = [device for device in range(count) if device not in placed]
    if missing:
        what = f"the job has {amount(count, 'device')}, and device {missing[0]} is not listed"
        raise StrategyError.of("device", what, "list every device: h200:0-3,a100:4-7")
    return [placed[device] for device in range(count)]


def costs_of_device(device: DeviceKind, model: Model, network: Network) -> Costs:
    """What an accelerator takes for a model, from its data sheet."""
    return Costs(
        flops=device.rate(dtype_of(model)),
        memory=device.moved,
        link=min(network.inside.bandwidth, FASTEST),
        latency=network.inside.latency,
        host_link=device.host_link,
        add=3 / device.moved,
        square=1 / device.moved,
        update=ADAM / device.moved,
        start=device.start,
        launch=device.launch,
        fused=device.fused,
        ahead=True,
        kind=device.name,
    )


def dtype_of(model: Model) -> str:
    """The type that most parameters have: that of most arithmetic."""
    found: Counter[str] = Counter()
    for bucket in model.buckets.values():
        for spec in bucket.specs:
            found[spec.dtype] += spec.numel
    return found.most_common(1)[0][0] if found else "float32"
