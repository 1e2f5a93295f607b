"""Put a price on a compiled strategy: the costs of a machine, and its plans on a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from piper.compiler import Compiled
from piper.ir.costs import Costs
from piper.ir.dag import Dag
from piper.names import Phase, RegionId, ValueId
from piper.plan.instructions import Add, Instruction, Run, Total, Update
from piper.sim.clock import Host, Simulated, simulate
from piper.sim.topology import Link, Topology


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
    between = topology or network_of(found, len(compiled.plans))
    return simulate(compiled.plans, Prices(compiled.dag, found), between, host_of(found), name)


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
