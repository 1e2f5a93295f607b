"""Put a price on a compiled strategy: the costs of a machine, and its plans on a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from piper.ir.costs import Costs
from piper.ir.dag import Dag
from piper.ir.model import Model
from piper.ir.replicas import replicas
from piper.ir.roles import Roles
from piper.ir.values import Role
from piper.job.compiler import Compiled
from piper.names import Device, Phase, RegionId, ValueId
from piper.plan.analyse.memory import peak
from piper.plan.instructions import Add, Instruction, Run, Total, Update
from piper.sim.clock import Host, Simulated, simulate
from piper.sim.devices import DeviceKind
from piper.sim.estimate import Estimate
from piper.sim.report import report
from piper.sim.topology import Link, Topology
from piper.sim.wiring import Alike

ADAM = 7  # times that an optimizer's step goes over a parameter: reads 4 tensors, writes 3


def price(
    compiled: Compiled,
    costs: Costs | None = None,
    topology: Topology | None = None,
    name: str = "simulated",
) -> Simulated:
    """A step of a compiled strategy on the clock.

    Costs are those it was compiled with, unless others are given; so is the network, where all
    devices are then in one node with equal links.
    """
    found = costs or compiled.dag.costs
    between = topology or network_of(found, len(compiled.roles.of))
    prices, host = Prices(compiled.dag, found), host_of(found)
    return simulate(compiled.plans, prices, between, host, name, alike(compiled.roles, between))


def alike(roles: Roles, between: Topology) -> Alike:
    """How many devices of its node, and of all, do the same as one of each role."""
    near = Counter((first, between.node(device)) for device, first in roles.of.items())
    everywhere = Counter(roles.of.values())

    def same(device: Device) -> tuple[int, int]:
        first = roles.of[device]
        return near[first, between.node(device)], everywhere[first]

    return same


def estimate(
    compiled: Compiled,
    found: Simulated,
    memory: float | None = None,
    optimizer: float = 2.0,
    staging: int = 1,
) -> Estimate:
    """What a step on the clock tells, and what every device holds; `memory` is what one has."""
    peaks = {plan.device: peak(compiled.dag, plan, optimizer, staging) for plan in compiled.plans}
    alike: dict[Device, list[Device]] = {}
    for device, first in compiled.roles.of.items():
        alike.setdefault(first, []).append(device)
    groups = {first: tuple(devices) for first, devices in alike.items()}
    return Estimate(report(found), peaks, groups, tokens_of(compiled.dag), memory)


def tokens_of(dag: Dag) -> int:
    """Of a step, on all replicas: elements of the first whole-number input, else rows."""
    batch = sorted(
        (value.index, value.parts, value.specs[0])
        for value in dag.values.values()
        if value.role is Role.BATCH and value.specs
    )
    found = replicas(node.devices for node in dag.computes if node.devices)
    copies = sum(map(len, found.feeds))
    for _, parts, spec in batch:
        if "int" in spec.dtype:
            return copies * parts * spec.numel
    return copies * batch[0][1] * (batch[0][2].shape[0] or 0) if batch else 0


def costs_of_device(device: DeviceKind, model: Model, network: Topology) -> Costs:
    """What an accelerator takes for a model, from its data sheet."""
    return Costs(
        flops=device.rate(dtype_of(model)),
        memory=device.moved,
        link=network.inside.bandwidth,
        latency=network.inside.latency,
        add=3 / device.moved,
        square=1 / device.moved,
        update=ADAM / device.moved,
        start=device.start,
        launch=device.launch,
        ahead=True,
    )


def dtype_of(model: Model) -> str:
    """The type that most parameters have: that of most arithmetic."""
    found: Counter[str] = Counter()
    for bucket in model.buckets.values():
        for spec in bucket.specs:
            found[spec.dtype] += spec.numel
    return found.most_common(1)[0][0] if found else "float32"


def host_of(costs: Costs) -> Host:
    return Host(not costs.ahead, costs.each, costs.post, costs.cores or None, costs.wire)


def network_of(costs: Costs, devices: int) -> Topology:
    """Everything in one node; exchanges were measured apart, stream by stream."""
    link = Link(costs.link, costs.latency)
    return Topology(max(1, devices), link, link, streams=costs.streams)


@dataclass
class Prices:
    """Seconds that instructions take on their device; each kind is worked out once."""

    dag: Dag
    costs: Costs
    runs: dict[tuple[str, str], float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    def __call__(self, one: Instruction) -> float:
        match one:
            case Run():
                key = (one.region, one.phase)
                if key not in self.runs:
                    self.runs[key] = self.run(*key)
                return self.runs[key]
            case Add():
                return self.costs.add and self.costs.add * self.size(one.value)
            case Update():
                return self.costs.update and self.costs.update * self.size(f"w:{one.bucket}")
            case Total():
                return self.costs.square and self.costs.square * self.sum(one.grads)
            case _:
                return 0.0

    def run(self, region: str, phase: str) -> float:
        found = self.dag.model.by_id[RegionId(region)]
        return self.costs.run(self.dag.model, found, Phase(phase))

    def sum(self, values: Sequence[str]) -> float:
        return sum(map(self.size, values))

    def size(self, value: str) -> float:
        """Bytes of a value, or of a sum of such values."""
        if value not in self.sizes:
            known = self.dag.values.get(ValueId(value.removeprefix("sum ")))
            self.sizes[value] = float(known.nbytes) if known else 0.0
        return self.sizes[value]
