"""Predict the step time and memory of a compiled strategy on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import chain
from typing import assert_never

from piper.costs import Costs
from piper.costs.costs import Host
from piper.costs.links import Network
from piper.costs.notes import notes
from piper.errors import StrategyError
from piper.ir.by_device.roles import Roles, own_roles, roles
from piper.ir.dag import Dag
from piper.ir.naming import weights
from piper.ir.values import Role, TensorSpec
from piper.job.compile.compiler import Compiled
from piper.names import B, BucketId, Device, F, Phase, RegionId, ValueId, amount
from piper.plan.analyse.memory import peak
from piper.plan.instructions import (
    Add,
    Exchange,
    Fetch,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Redistribute,
    Reduce,
    Run,
    Send,
    Slice,
    Store,
    Total,
    Update,
)
from piper.plan.lower.role_plans import role_plans
from piper.sim.clock import Simulated, simulate
from piper.sim.network_demands import Alike
from piper.sim.prediction import Prediction, StageTags
from piper.sim.report import report
from piper.strategies.cuts import seconds_of
from piper.view.reports.mesh_advice import advice

TOKEN_IDS = ("int64", "int32")
JobCosts = Costs | Sequence[Costs]  # of all devices, or of each, by its number


def price(
    compiled: Compiled,
    costs: JobCosts | None = None,
    network: Network | None = None,
    name: str = "simulated",
) -> Simulated:
    """Simulate a step of a compiled strategy.

    By default, costs are those it was compiled with, and all devices are in one node with equal
    links. If devices are of different kinds, there are costs for each device, by its number. Where
    devices of one role are of different kinds, all devices are simulated.
    """
    each = device_costs(compiled, costs)
    known = compiled.roles
    uniform = all(each[device] is each[first] for device, first in known.of.items())
    plans = compiled.plans if uniform else compiled.device_plans
    between = network or each[plans[0].device].network(len(known.of))
    same = alike(known if uniform else own_roles(known.of), between)
    prices = prices_of(compiled.dag, plans, each)
    return simulate(plans, prices, between, hosts_of(plans, each), name, same)


def costs_for(compiled: Compiled, costs: Costs | None) -> Costs:
    """The costs of regions in the mode that the strategy was compiled for."""
    return (costs or compiled.costs).in_mode(compiled.costs.mode)


def device_costs(compiled: Compiled, costs: JobCosts | None) -> Mapping[Device, Costs]:
    """The costs on each device. Devices of one kind have the same object."""
    devices = compiled.roles.of
    if costs is None or isinstance(costs, Costs):
        known = costs_for(compiled, costs)
        return {device: known.on(device) for device in devices}
    if len(costs) <= max(devices):
        what = f"costs for {amount(len(costs), 'device')} of {amount(len(devices), 'device')}"
        raise StrategyError.of("costs", what, "give costs for every device, by its number")
    kinds = {id(one): costs_for(compiled, one) for one in costs}
    return {device: kinds[id(costs[device])] for device in devices}


def prices_of(dag: Dag, plans: Sequence[Plan], each: Mapping[Device, Costs]) -> list[Prices]:
    """What instructions cost on the device of each plan."""
    made: dict[tuple[int, int], Prices] = {}
    for plan in plans:
        seen, costs = dag.seen_by(plan.device), each[plan.device]
        if (id(seen), id(costs)) not in made:
            made[id(seen), id(costs)] = Prices(seen, costs, plans)
    return [made[id(dag.seen_by(plan.device)), id(each[plan.device])] for plan in plans]


def hosts_of(plans: Sequence[Plan], each: Mapping[Device, Costs]) -> list[Host]:
    """The hosts of all devices. They must all run ahead, or all wait."""
    hosts = [each[plan.device].host for plan in plans]
    if len({(host.blocks, host.cores, host.wire) for host in hosts}) > 1:
        fix = "simulate GPUs with GPUs, and measure CPUs on one kind of machine"
        what = "some devices have hosts that wait or share cores, others do not"
        raise StrategyError.of("costs", what, fix)
    return hosts


def alike(known: Roles, between: Network) -> Alike:
    """How many devices of a role there are, in its node and in total."""
    near = Counter((first, between.node(device)) for device, first in known.of.items())
    everywhere = Counter(known.of.values())

    def same(device: Device) -> tuple[int, int]:
        first = known.of[device]
        return near[first, between.node(device)], everywhere[first]

    return same


def predict(
    compiled: Compiled,
    found: Simulated,
    costs: JobCosts | None = None,
    memory: float | Mapping[Device, float] | None = None,
    optimizer: float = 2.0,
    staging: int = 1,
    network: Network | None = None,
) -> Prediction:
    """The report of a simulated step, and the peak memory. `memory` is that of a device.

    With a network, it notes if another order of the devices would send less between nodes.
    """
    state = optimizer, staging, compiled.costs.mode.is_compiled
    peaks = {plan.device: peak(compiled.dag, plan, *state) for plan in found.plans}
    alike: dict[Device, list[Device]] = {}
    for device, first in compiled.roles.of.items():
        alike.setdefault(device if device in peaks else first, []).append(device)
    groups = {first: tuple(devices) for first, devices in alike.items()}
    mesh = mesh_notes(compiled, network) if network else ()
    noted = (*cost_notes(compiled, costs), *mesh)
    sizes, flops = sizes_of(compiled.dag), flops_of(compiled.dag)
    tags = {plan.device: tags_of(compiled.dag, plan) for plan in found.plans}
    stages = {device: stages_of(mine) for device, mine in tags.items()}
    layers = {device: layers_of(mine) for device, mine in tags.items()}
    return Prediction(
        report(found), peaks, groups, *sizes, memory, noted, flops,
        stages=stages, layers=layers, is_cut=compiled.cuts and is_known(compiled, costs),
    )  # fmt: skip


def is_known(compiled: Compiled, costs: JobCosts | None) -> bool:
    """Whether regions take as long by these costs as by those that the stages were cut by."""
    model = compiled.dag.model
    pairs = {
        (id(one), id(other)): (one, other)
        for device, one in device_costs(compiled, costs).items()
        for other in [compiled.costs.on(device)]
    }
    return all(seconds_of(model, one) == seconds_of(model, two) for one, two in pairs.values())


def tags_of(dag: Dag, plan: Plan) -> list[StageTags]:
    """Those of all regions that a device runs, the outermost first: stages, then layers."""
    runs = dict.fromkeys(one.region for one in plan.instructions if isinstance(one, Run))
    return [dag.model.by_id[RegionId(region)].tags for region in runs]


def layers_of(tags: Sequence[StageTags]) -> int:
    """
    >>> layers_of([(("PP", 0), ("L", 0)), (("PP", 0), ("L", 1)), (("PP", 0), ("L", 1), ("EP", 0))])
    2
    >>> layers_of([(("PP", 0),), (("PP", 0), ("EP", 0))])  # a stage with parts, and not of layers
    1
    """
    depth = min(2, *map(len, tags)) if tags else 0
    return len({one[:depth] for one in tags})


def stages_of(tags: Sequence[StageTags]) -> StageTags:
    return tuple(sorted(set(chain.from_iterable(one[:1] for one in tags))))


def flops_of(dag: Dag) -> float:
    """Of a step on all replicas, without what is recomputed. Divided regions run on several."""
    return sum(count * team_flops(seen) for seen, count in dag.teams)


def team_flops(dag: Dag) -> float:
    runs = [dag.model.by_id[node.region] for node in dag.computes if node.phase is F]
    each = (region.ways * region.flops.get(p, 0.0) for region in runs for p in (F, B))
    return sum(each)


def cost_notes(compiled: Compiled, costs: JobCosts | None = None) -> tuple[str, ...]:
    """Notes on times of the plans that were not measured, each once."""
    model = compiled.dag.model
    runs = [(model.by_id[node.region].code, node.phase) for node in compiled.dag.computes]
    kinds = {id(one): one for one in device_costs(compiled, costs).values()}.values()
    return tuple(dict.fromkeys(chain.from_iterable(notes(one, model, runs) for one in kinds)))


def mesh_notes(compiled: Compiled, between: Network) -> tuple[str, ...]:
    """A note if another order of the devices would send less between nodes."""
    few = roles(compiled.dag)
    plans = [plan for plan in compiled.plans if plan.device in few.first]
    groups, found = role_plans(compiled.dag, plans, few)
    note = advice(groups, list(found.values()), between.node)
    return (note,) if note else ()


def sizes_of(dag: Dag) -> tuple[int, int | None]:
    """Samples and tokens of a step on all replicas."""
    found = [(count, *team_sizes(seen)) for seen, count in dag.teams]
    samples = sum(count * rows for count, rows, _ in found)
    if any(tokens is None for _, _, tokens in found):
        return samples, None
    return samples, sum(count * (tokens or 0) for count, _, tokens in found)


def team_sizes(dag: Dag) -> tuple[int, int | None]:
    """A batch that begins with token ids, as [rows, length], has tokens."""
    batch: dict[int, dict[int, TensorSpec]] = {}  # by input, then by microbatch
    for value in dag.values.values():
        if value.role is Role.BATCH and value.specs:
            batch.setdefault(value.index, {})[value.part] = value.specs[0]
    inputs = [list(batch[index].values()) for index in sorted(batch)]
    first = next((specs for specs in inputs if specs[0].dtype != "bool"), [])
    samples = sum(spec.shape[0] or 0 for spec in inputs[0]) if inputs else 0
    if not first or not all(spec.dtype in TOKEN_IDS and len(spec.shape) == 2 for spec in first):
        return samples, None
    return samples, sum(spec.numel for spec in first)


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
            case Slice():
                return self.costs.addition(self.bytes_processed(one))
            case Store() | Fetch():
                return self.costs.host_copy(one.copied)
            case Load() | Keep() | Free():
                return 0.0
            case Send() | Recv() | Reduce() | Gather() | Exchange() | Redistribute():
                return 0.0
            case _:
                assert_never(one)

    def run(self, region: str, phase: str) -> float:
        found = self.dag.model.by_id[RegionId(region)]
        return self.costs.region(self.dag.model, found, Phase(phase))

    def bytes_processed(self, one: Add | Slice | Update | Total) -> float:
        """Bytes that are added, copied, updated or squared."""
        match one:
            case Add():
                return self.size(one.value)
            case Slice():
                return self.size(one.into)
            case Update():
                bucket = self.dag.model.buckets[BucketId(one.bucket)]
                held = self.dag.values[weights(bucket.id)].specs
                return sum(spec.nbytes for spec in bucket.updated(held))
            case Total():
                return sum(map(self.size, one.grads))

    def size(self, buffer: str) -> float:
        """Bytes of a buffer. A sum is as large as its first part."""
        if buffer not in self.sizes:
            known = self.dag.local_values.get(ValueId(self.first_parts.get(buffer, buffer)))
            self.sizes[buffer] = float(known.nbytes) if known else 0.0
        return self.sizes[buffer]
