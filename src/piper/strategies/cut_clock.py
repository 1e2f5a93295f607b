"""How long a step takes under a cut into stages: the schedule's table on a clock.

It counts what the simulator counts most: passes of stages on their own devices, gradients that are
added up, messages between stages, reductions and updates at the end. So cuts can be compared in
milliseconds, without compiling them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm

from piper.costs import Costs
from piper.directives import Directive, Place, Remat, Stage
from piper.directives.stage import Layer, kept_bytes
from piper.ir.filters import fits
from piper.ir.model import Model, Region
from piper.ir.partition.balance import ROUNDING
from piper.ir.values import Role
from piper.names import BW, B, Device, F, Phase
from piper.strategies.dataflow import need, whole
from piper.strategies.peak import stage_peaks
from piper.strategies.schedules.table import Table, ranks_of
from piper.strategies.timing import start_times

Homes = Mapping[int, Sequence[Device]]  # of each stage; several times where it has more replicas
Sums = list[float]  # over the layers before each


@dataclass(frozen=True)
class CutClock:
    """A schedule of a model whose stages are still open."""

    table: Table
    stage: Stage
    layers: Sequence[Layer]
    model: Model
    homes: Homes
    costs: Costs
    remats: Sequence[Remat] = ()
    known: dict[tuple[int, Phase, object], Sums] = field(default_factory=dict)
    times: dict[tuple[int, int, int], StageTimes] = field(default_factory=dict)

    def seconds(self, sizes: Sequence[int]) -> float:
        """The end of the step if stages have so many layers."""
        ends = [0, *accumulate(sizes)]
        stages = [self.known_times(s, a, b) for s, (a, b) in enumerate(pairwise(ends))]
        messages = [*map(self.message, ends), 0.0]
        took = [one.passes[phase, later] for one in stages for phase, later in self.kinds_of_pass]
        free, done = self.run(took, messages)
        for stage, one in enumerate(stages):
            rank = self.ranks[stage]
            free[rank] = max(free[rank], done[stage] + one.reduce)
        for stage, one in enumerate(stages):
            free[self.ranks[stage]] += one.update
        return max(free)

    def run(self, took: Sequence[float], messages: Sequence[float]) -> tuple[Sums, Sums]:
        """When each rank has done its last pass, and each stage."""
        free, done = [0.0] * len(self.table.rows), [0.0] * self.stage.count
        ends = [0.0] * (len(self.passes) + 1)  # the last is that of what waits for nothing
        for at, (rank, stage, kind, needed, message) in enumerate(self.passes):
            start = ends[needed] + messages[message]
            if free[rank] > start:
                start = free[rank]
            done[stage] = free[rank] = ends[at] = start + took[kind]
        return free, done

    @cached_property
    def passes(self) -> list[tuple[int, int, int, int, int]]:
        """In an order in which they can run: the rank and stage of each, its kind, the pass that
        it waits for, and the boundary that the message crosses."""
        last, ranks, order = self.stage.count - 1, self.ranks, start_times(self.table)
        number = {whole(action): at for at, action in enumerate(order)}
        kinds = {kind: k for k, kind in enumerate(self.kinds_of_pass)}
        found = []
        for action in order:
            stage, needed = action.stage, need(action, last)
            kind = stage * len(kinds) + kinds[action.phase, action.microbatch > 0]
            far = needed is not None and ranks[needed.stage] != ranks[stage]
            boundary = (stage if action.phase is F else stage + 1) if far else -1
            found.append((ranks[stage], stage, kind, number[needed] if needed else -1, boundary))
        return found

    @cached_property
    def kinds_of_pass(self) -> list[tuple[Phase, bool]]:
        """Phases, of the first microbatch and of later ones, whose gradients are added."""
        phases = dict.fromkeys(action.phase for action in self.table.actions)
        return [(phase, later) for phase in phases for later in (False, True)]

    @cached_property
    def ranks(self) -> dict[int, int]:
        return ranks_of(self.table)

    def known_times(self, stage: int, first: int, last: int) -> StageTimes:
        key = stage, first, last
        if key not in self.times:
            self.times[key] = self.stage_times(*key)
        return self.times[key]

    def stage_times(self, stage: int, first: int, last: int) -> StageTimes:
        """A stage of the layers from the first up to the last."""
        kinds, factor = self.kinds[stage], self.factors[stage]
        held = difference(self.parameters, first, last)
        add = max(one.addition(held) for one in kinds)
        passes = {}
        for phase, later in self.kinds_of_pass:
            times = (difference(self.sums(one, phase, stage), first, last) for one in kinds)
            more = add if later and phase in (B, BW) else 0.0
            passes[phase, later] = factor * (max(times) + more)
        replicas = len({*self.homes[stage]})
        moved = 2 * held * (replicas - 1) / replicas
        reduce = max(one.transit(moved, "dp") for one in kinds)
        return StageTimes(passes, max(one.optimizer(held) for one in kinds), reduce)

    @cached_property
    def said(self) -> tuple[float, ...] | None:
        return said_speeds(self.stage, self.homes)

    @cached_property
    def kinds(self) -> list[list[Costs]]:
        """The costs of each stage on its devices. Speeds that are said count instead of kinds."""
        if self.said is not None:
            return [[self.costs]] * self.stage.count
        return [kinds_of(self.costs, self.homes[stage]) for stage in range(self.stage.count)]

    @cached_property
    def factors(self) -> list[float]:
        """How often a stage runs for one pass of the schedule, and how slow it is said to be."""
        speeds = self.said or (1.0,) * self.stage.count
        usual = sum(speeds) / len(speeds)
        return [t * usual / v for t, v in zip(turns(self.homes), speeds, strict=True)]

    def sums(self, costs: Costs, phase: Phase, stage: int) -> Sums:
        """The seconds of all layers before each, as they are in this stage."""
        policies = [one.policy for one in self.remats if fits(one.filter, {self.stage.name: stage})]
        key = id(costs), phase, policies[0] if policies else None
        if key not in self.known:
            times = [
                sum(self.region(costs, phase, region, policies) for region in layer)
                for layer in self.layers
            ]
            self.known[key] = [0.0, *accumulate(times)]
        return self.known[key]

    def region(
        self, costs: Costs, phase: Phase, region: Region, policies: Sequence[object]
    ) -> float:
        if phase is not F and not region.has_backward:
            return 0.0
        other = region.recomputed.get(policies[0]) if policies else None  # type: ignore[call-overload]
        return costs.region(self.model, other or region, phase)

    @cached_property
    def parameters(self) -> Sums:
        """Bytes that are trained in all layers before each."""
        return [0.0, *accumulate(trained_bytes(self.model, layer) for layer in self.layers)]

    def fullest(self, sizes: Sequence[int]) -> float:
        """Bytes on the rank that holds the most: state, and activations of live microbatches."""
        held = [0.0] * len(self.table.rows)
        for stage, (first, last) in enumerate(pairwise([0, *accumulate(sizes)])):
            kept = self.live[stage] * difference(self.activations, first, last)
            state = self.stage.state * difference(self.parameters, first, last)
            held[self.ranks[stage]] += state + kept
        return max(held)

    @cached_property
    def live(self) -> tuple[int, ...]:
        return stage_peaks(self.table)

    @cached_property
    def activations(self) -> Sums:
        """Bytes of one microbatch that all layers before each keep."""
        always = next((one.policy for one in self.remats if not one.filter.keys), None)
        regions = [
            [r if always is None else r.recomputed.get(always, r) for r in layer]
            for layer in self.layers
        ]
        kept = (sum(kept_bytes(self.model, region) for region in layer) for layer in regions)
        return [0.0, *accumulate(map(float, kept))]

    @cached_property
    def boundaries(self) -> list[float]:
        """Bytes that go from the layers before each to those from it on."""
        layer_of = {region.id: k for k, layer in enumerate(self.layers) for region in layer}
        made = {v: layer_of[r.id] for r in self.model.regions for v in r.outputs}
        read: dict[object, int] = {}
        for region in self.model.regions:
            for value in region.inputs:
                read[value] = max(read.get(value, 0), layer_of[region.id])
        found = [0.0] * (len(self.layers) + 1)
        for value, first in made.items():
            if self.model.values[value].role is Role.ACTIVATION:
                for layer in range(first + 1, read.get(value, first) + 1):
                    found[layer] += self.model.values[value].nbytes
        return found

    def message(self, layer: int) -> float:
        return self.costs.message(self.boundaries[layer], "pp")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage on its slowest device."""

    passes: Mapping[tuple[Phase, bool], float]  # with gradients that are added, for True
    update: float
    reduce: float  # of its gradients among replicas


def difference(sums: Sums, first: int, last: int) -> float:
    return sums[last] - sums[first]


def turns(homes: Homes) -> list[float]:
    """How often the busiest device of each stage runs it for one pass, if it has fewer devices
    than the stage has replicas.

    >>> turns({0: (0,), 1: (1, 1, 2, 3)}), turns({0: (0, 2), 1: (1, 3)})
    ([4.0, 2.0], [1.0, 1.0])
    """
    most = lcm(*map(len, homes.values()))
    counts = (Counter(home) for _, home in sorted(homes.items()))
    return [most / one.total() * max(one.values()) for one in counts]


def said_speeds(stage: Stage, homes: Homes) -> tuple[float, ...] | None:
    """How fast single devices of each stage are, if the strategy says that they differ."""
    if stage.speeds is None:
        return None
    each = [speed * turn for speed, turn in zip(stage.speeds, turns(homes), strict=True)]
    equal = max(each) <= min(each) * (1 + ROUNDING)
    return None if equal else tuple(each)


def kinds_of(costs: Costs, devices: Sequence[Device]) -> list[Costs]:
    """The different costs of some devices."""
    return list({id(one): one for one in map(costs.on, devices)}.values())


def trained_bytes(model: Model, layer: Layer) -> float:
    buckets = dict.fromkeys(bucket for region in layer for bucket in region.buckets)
    trained = (model.buckets[bucket] for bucket in buckets if model.buckets[bucket].trainable)
    return sum(spec.nbytes for bucket in trained for spec in bucket.specs)


def homes_of_stages(program: Iterable[Directive], stage: Stage) -> dict[int, tuple[Device, ...]]:
    """Where the directives place each stage, as far as they name stages alone."""
    found: dict[int, tuple[Device, ...]] = {}
    for one in program:
        if isinstance(one, Place) and {*one.filter.keys} <= {stage.name}:
            for index in range(stage.count):
                if fits(one.filter, {stage.name: index}):
                    found[index] = tuple(one.devices)
    return found


def remats_of_stages(program: Iterable[Directive], stage: Stage) -> Iterator[Remat]:
    """What is recomputed, as far as it is known before the cut."""
    for one in program:
        if isinstance(one, Remat) and not one.is_auto and {*one.filter.keys} <= {stage.name}:
            yield one
