"""Predict the step time and memory of a compiled strategy on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import assert_never

from piper.costs import Costs
from piper.costs.links import Network
from piper.costs.notes import notes
from piper.ir.dag import Dag
from piper.ir.naming import weights
from piper.ir.replicas import replicas
from piper.ir.roles import Roles
from piper.ir.values import Role
from piper.job.compiler import Compiled
from piper.names import BucketId, Device, Phase, RegionId, ValueId
from piper.plan.analyse.memory import peak
from piper.plan.instructions import (
    Add,
    Exchange,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    Total,
    Update,
)
from piper.sim.clock import Simulated, simulate
from piper.sim.network_demands import Alike
from piper.sim.prediction import Prediction
from piper.sim.report import report


def price(
    compiled: Compiled,
    costs: Costs | None = None,
    network: Network | None = None,
    name: str = "simulated",
) -> Simulated:
    """Simulate a step of a compiled strategy.

    By default, costs are those it was compiled with, and all devices are in one node with equal
    links.
    """
    found = costs_for(compiled, costs)
    between = network or found.network(len(compiled.roles.of))
    prices, same = Prices(compiled.dag, found, compiled.plans), alike(compiled.roles, between)
    return simulate(compiled.plans, prices, between, found.host, name, same)


def costs_for(compiled: Compiled, costs: Costs | None) -> Costs:
    """The costs of regions in the mode that the strategy was compiled for."""
    return (costs or compiled.costs).in_mode(compiled.costs.mode)


def alike(roles: Roles, between: Network) -> Alike:
    """How many devices of a role there are, in its node and in total."""
    near = Counter((first, between.node(device)) for device, first in roles.of.items())
    everywhere = Counter(roles.of.values())

    def same(device: Device) -> tuple[int, int]:
        first = roles.of[device]
        return near[first, between.node(device)], everywhere[first]

    return same


def predict(
    compiled: Compiled,
    found: Simulated,
    costs: Costs | None = None,
    memory: float | None = None,
    optimizer: float = 2.0,
    staging: int = 1,
) -> Prediction:
    """The report of a simulated step, and the peak memory. `memory` is that of one device."""
    peaks = {plan.device: peak(compiled.dag, plan, optimizer, staging) for plan in compiled.plans}
    alike: dict[Device, list[Device]] = {}
    for device, first in compiled.roles.of.items():
        alike.setdefault(first, []).append(device)
    groups = {first: tuple(devices) for first, devices in alike.items()}
    unmeasured = cost_notes(compiled, costs)
    return Prediction(report(found), peaks, groups, tokens_of(compiled.dag), memory, unmeasured)


def cost_notes(compiled: Compiled, costs: Costs | None = None) -> tuple[str, ...]:
    """Notes on times of the plans that were not measured."""
    model = compiled.dag.model
    runs = ((model.by_id[node.region].code, node.phase) for node in compiled.dag.computes)
    return notes(costs_for(compiled, costs), model, runs)


def tokens_of(dag: Dag) -> int:
    """Tokens of a step on all replicas: elements of the first integer input, else samples."""
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


@dataclass
class Prices:
    """Seconds that instructions take on their device, cached by kind."""

    dag: Dag
    costs: Costs
    plans: InitVar[Sequence[Plan]]
    runs: dict[tuple[str, str], float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self, plans: Sequence[Plan]) -> None:
        every = (one for plan in plans for one in plan.instructions)
        self.first_parts = {one.into: one.value for one in every if isinstance(one, Keep)}

    def __call__(self, one: Instruction) -> float:
        match one:
            case Run():
                key = (one.region, one.phase)
                if key not in self.runs:
                    self.runs[key] = self.run(*key)
                return self.runs[key]
            case Add():
                return self.costs.addition(self.bytes_processed(one))
            case Update():
                return self.costs.optimizer(self.bytes_processed(one))
            case Total():
                return self.costs.norm(self.bytes_processed(one))
            case Load() | Keep() | Send() | Recv() | Reduce() | Gather() | Exchange() | Free():
                return 0.0
            case _:
                assert_never(one)

    def run(self, region: str, phase: str) -> float:
        found = self.dag.model.by_id[RegionId(region)]
        return self.costs.region(self.dag.model, found, Phase(phase))

    def bytes_processed(self, one: Add | Update | Total) -> float:
        """Bytes that are added, updated or squared."""
        match one:
            case Add():
                return self.size(one.value)
            case Update():
                bucket = self.dag.model.buckets[BucketId(one.bucket)]
                held = self.dag.values[weights(bucket.id)].specs
                return sum(spec.nbytes for spec in bucket.updated(held))
            case Total():
                return sum(map(self.size, one.grads))

    def size(self, buffer: str) -> float:
        """Bytes of a buffer. A sum is as large as its first part."""
        if buffer not in self.sizes:
            known = self.dag.values.get(ValueId(self.first_parts.get(buffer, buffer)))
            self.sizes[buffer] = float(known.nbytes) if known else 0.0
        return self.sizes[buffer]
