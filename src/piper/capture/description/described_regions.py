"""All regions as data, with the graphs behind them: as captured, and recomputed on request."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from piper.capture.description.buckets import Part
from piper.capture.description.description import Cost, Tags, describe
from piper.capture.description.region_graphs import Lowered
from piper.capture.description.stored_costs import known_cost
from piper.capture.fx_nodes import value
from piper.capture.graphs import workspace
from piper.capture.graphs.flops import GraphWork
from piper.capture.graphs.phases import Layout, phase_graphs
from piper.ir.model import Region
from piper.ir.remat_policy import Recomputation, RematPolicy
from piper.ir.values import Role, Value
from piper.names import B, Phase, RegionId, ValueId


@dataclass(frozen=True)
class RegionSource:
    """What a region is described from."""

    lowered: Lowered
    part: Part
    named: tuple[RegionId, Tags, int]


@dataclass
class DescribedRegions:
    """Regions in program order. Equal regions share their graphs, by the name of their code."""

    names: dict[fx.Node, ValueId]
    values: Mapping[ValueId, Value]
    sources: Sequence[RegionSource]
    graphs: dict[str, Mapping[Phase, fx.GraphModule]] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    variants: dict[tuple[tuple, RematPolicy], Lowered] = field(default_factory=dict)

    def captured(self) -> tuple[Region, ...]:
        """The regions as they are without any directive."""
        return tuple(self._described(source, source.lowered) for source in self.sources)

    def recomputed(
        self, regions: Iterable[Region], policies: Sequence[RematPolicy]
    ) -> Iterator[Region]:
        """The same regions with descriptions of them that recompute, one for each policy."""
        for region, source in zip(regions, self.sources, strict=True):
            found = {p: self._recomputed(region, source, p) for p in policies}
            yield replace(region, recomputed=found if region.has_backward else {})

    def lowered(self, source: RegionSource, policy: RematPolicy) -> Lowered:
        """A region with a backward that recomputes. Equal regions are cut once."""
        key = source.lowered.key, policy
        if key not in self.variants:
            self.variants[key] = source.lowered.recomputing(policy)
        cut = self.variants[key]
        return replace(source.lowered, key=cut.key, cut=cut.cut, keep=cut.keep)

    def _recomputed(self, kept: Region, source: RegionSource, policy: RematPolicy) -> Region:
        found = self._described(source, self.lowered(source, policy))
        frees = self._held_bytes(kept) - self._held_bytes(found)
        more = found.flops.get(B, 0.0) - kept.flops.get(B, 0.0)
        return replace(found, recomputes=Recomputation(policy, frees, more))

    def _described(self, source: RegionSource, lowered: Lowered) -> Region:
        code = self._code(lowered, source.part[1])
        return describe(lowered, *source.named, code, self.names, source.part, self.costs[code])

    def _code(self, lowered: Lowered, layout: Layout) -> str:
        """A name for what computes it. Equal regions share their graphs."""
        types = layout.gradients if any(layout.gradients) else ()
        text = repr((lowered.key, layout, *types))
        code = hashlib.sha256(text.encode()).hexdigest()[:12]
        if code not in self.costs:  # there may be a graph from a capture with other sizes
            graphs = self.graphs.get(code) or phase_graphs(
                lowered.joint, lowered.cut, layout, lowered.updates
            )
            known = known_cost(
                lowered.joint.entry, code, partial(count, graphs, experts_of(lowered))
            )
            self.graphs[code], self.costs[code] = graphs, known
        return code

    def _held_bytes(self, region: Region) -> int:
        """What waits for the backward: saved activations, and activations that it reads again."""
        again = (self.values[region.inputs[i]] for i in region.backward_inputs)
        inputs = sum(value.nbytes for value in again if value.role is Role.ACTIVATION)
        return inputs + sum(spec.nbytes for spec in region.saved)


def experts_of(lowered: Lowered) -> int:
    """How many experts it has, if every weight has a row for each and rows are counted by expert.

    0 if there are none, or as many rows as experts: then sizes do not tell which is which.
    """
    nodes = lowered.chunk.graph.graph.find_nodes(op="placeholder")
    shapes = [known_sizes(node) for node in nodes]
    weights, inputs = shapes[: len(lowered.chunk.weights)], shapes[len(lowered.chunk.weights) :]
    counts = [shape for shape in inputs if len(shape) == 1]
    alike = {shape[:1] for shape in (*weights, *counts)}
    rows = {shape[:1] for shape in inputs if len(shape) > 1}
    suits = bool(weights and counts) and len(alike) == 1 and not alike & rows
    return counts[0][0] or 0 if suits else 0


def known_sizes(node: fx.Node) -> tuple[int | None, ...]:
    """None for each that depends on data."""
    found = getattr(value(node), "shape", ())
    return tuple(size if isinstance(size, int) else None for size in found)


def count(phases: Mapping[Phase, fx.GraphModule], experts: int = 0) -> Cost:
    some = phases if experts else {}
    work = {phase: GraphWork(graph) for phase, graph in phases.items()}
    return Cost(
        {phase: one.flops for phase, one in work.items()},
        {phase: workspace.count(graph, phase) for phase, graph in phases.items()},
        {phase: one.traffic for phase, one in work.items()},
        {phase: len(one.kernels) for phase, one in work.items()},
        {phase: one.fused for phase, one in work.items()},
        {
            phase: workspace.count(graph, phase, work[phase].never_written)
            for phase, graph in phases.items()
        },
        {phase: workspace.moments(graph, phase, None, experts) for phase, graph in some.items()},
        {
            phase: workspace.moments(graph, phase, work[phase].never_written, experts)
            for phase, graph in some.items()
        },
    )
