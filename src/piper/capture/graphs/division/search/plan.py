"""`search`: from a space of choices to the placements of everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod

from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Option, operands
from piper.capture.graphs.division.search.chain import Near, cheapest, near
from piper.capture.graphs.division.search.conversions import Conversions, Read
from piper.capture.graphs.division.search.frontier import WIDTHS, Frontier
from piper.capture.graphs.division.search.moves import Moves
from piper.capture.graphs.division.search.prices import conversion_price
from piper.capture.graphs.division.search.segments import (
    Matrix,
    Segment,
    Solution,
    entries,
    last_uses,
    placements_of,
    segments_of,
    solve,
)
from piper.capture.graphs.division.search.space import Space, held_for
from piper.ir.placement.placements import Invariant, Partial, Placement, Replicated

ROUGH = WIDTHS[:1]
ROUGHEST = (20,)  # for hubs, of which many placements are tried
CLOSE = 0.005  # what costs so much more than the best, roughly, is looked at closely, too
COMBINATIONS = 64  # of placements of shared parameters that are tried

Fixed = dict[fx.Node, Placement]  # of shared parameters and of hubs


@dataclass
class Plan:
    """How everything is placed."""

    cost: float
    options: dict[fx.Node, Option] = field(default_factory=dict)
    held: dict[fx.Node, Placement] = field(default_factory=dict)  # parameters
    reads: list[Read] = field(default_factory=list)  # conversions, in the order of the graph
    fixed: Fixed = field(default_factory=dict)
    entries: tuple[Placement | None, ...] = ()  # where each segment begins


@dataclass
class _Search:
    """`frontiers`: by a segment's key and what is fixed in it, where a run may go on from."""

    space: Space
    result: fx.Node

    def __post_init__(self) -> None:
        self.last = last_uses(self.space, self.result)
        self.segments = segments_of(self.space, self.last)
        self.moves = Moves(Conversions(self.space), {})
        self.frontiers: dict[tuple, tuple[Segment, Frontier]] = {}
        self.solved: dict[tuple, dict[Placement, Solution]] = {}
        self.fixed: dict[fx.Node, list[fx.Node]] = {}

    def cheapest(self, every: Iterable[Fixed], close: Near | None = None) -> Plan:
        """Roughly. `close`: where segments may begin, if not everywhere."""
        found = (self.plan(fixed, ROUGHEST, close) for fixed in every)
        return min((plan for plan in found if plan is not None), key=lambda plan: plan.cost)

    def refined(self, rough: Plan) -> Plan:
        """The same placements of shared parameters and hubs, and all others looked at closely."""
        matrix = partial(self._matrix, self.moves.holding(rough.fixed), ROUGH, None)
        close = near(self.segments, matrix, CLOSE)
        for key, begun in self.begun(rough).items():
            close[key] |= begun
        found = self.plan(rough.fixed, WIDTHS, close)
        return found if found is not None and found.cost < rough.cost else rough

    def begun(self, plan: Plan) -> Near:
        """Where the segments of a plan begin."""
        found: Near = {segment.key: set() for segment in self.segments}
        for segment, entry in zip(self.segments, plan.entries, strict=True):
            found[segment.key].add(entry)
        return found

    def _matrix(
        self, moves: Moves, widths: tuple[int, ...], close: Near | None, segment: Segment
    ) -> Matrix:
        key = segment.key, tuple(moves.held[node] for node in self._fixed(segment))
        if key not in self.frontiers:
            made = Frontier(moves, segment.entry, segment.nodes, self.last)
            self.frontiers[key] = segment, made
        known, frontier = self.frontiers[key]
        found: Matrix = {}
        for entry in entries(frontier, known):
            if close is None or entry in close[segment.key]:
                if (key, entry, widths) not in self.solved:
                    self.solved[key, entry, widths] = solve(frontier, known, entry, widths)
                found[entry] = self.solved[key, entry, widths]
        return found

    def plan(self, fixed: Fixed, widths: tuple[int, ...], close: Near | None = None) -> Plan | None:
        """The cheapest plan with shared parameters and hubs placed so, if there is one."""
        matrix = partial(self._matrix, self.moves.holding(fixed), widths, close)
        ends = cheapest(self.segments, matrix)
        found = [
            (cost + more, end, path)
            for end, (cost, path) in ends.items()
            if end is not None and (more := self._to_whole(end)) is not None
        ]
        if not found:
            return None
        cost, end, path = min(found, key=lambda one: one[0])
        held = {node: fixed[node] for node in self.space.shared}
        kept = sum(self._kept(*one) for one in held.items())
        begun = tuple(solution.entry for solution in path)
        made = Plan(cost + kept, held=held, fixed=fixed, entries=begun)
        for segment, solution in zip(self.segments, path, strict=True):
            for node, choice in solution.of(segment):
                made.options[node] = choice.option
                made.reads += choice.reads
            made.reads += solution.conversion(segment)
        if end != Invariant():
            made.reads.append(Read(self.result, end, Invariant()))
        made.reads = list(needed(made))
        self._hold(made)
        return made

    def _fixed(self, segment: Segment) -> list[fx.Node]:
        """What a segment reads or makes, and whose placement is not its own choice."""
        if segment.exit not in self.fixed:
            near = {segment.entry, *segment.nodes}
            near.update(operand for node in segment.nodes for operand in operands(node))
            self.fixed[segment.exit] = [
                n for n in (*self.space.shared, *self.space.hubs) if n in near
            ]
        return self.fixed[segment.exit]

    def _to_whole(self, end: Placement) -> float | None:
        """The loss is whole on all devices."""
        request = self.space.requests.get(self.result)
        ways = request.ways if request else 1
        size = value(self.result).nbytes
        return conversion_price(self.space.start, end, Invariant(), size, ways)

    def _kept(self, parameter: fx.Node, placement: Placement) -> float:
        user = next(node for node in self.space.order if parameter in operands(node))
        held = self.space.held(user, parameter, placement)
        return held.price if held else 0.0

    def _hold(self, plan: Plan) -> None:
        for node, option in plan.options.items():
            for operand, read in zip(operands(node), option.inputs, strict=True):
                if operand in self.space.parameters and operand not in plan.held:
                    held = self.space.held(node, operand, read)
                    assert held is not None
                    plan.held[operand] = held.placement

    def combinations(self) -> Iterator[dict[fx.Node, Placement]]:
        """How shared parameters may be held. Of many, only some are tried."""
        every = {node: self._candidates(node) for node in self.space.shared}
        if prod(map(len, every.values())) <= COMBINATIONS:
            for chosen in product(*every.values()):
                yield dict(zip(every, chosen, strict=True))
            return
        for placement in (Replicated(), Invariant()):
            yield dict.fromkeys(every, placement)

    def _candidates(self, parameter: fx.Node) -> list[Placement]:
        """Placements in which all its readers can read it."""
        found: list[list[Placement]] = []
        for node in self.space.order:
            if parameter in operands(node):
                at = operands(node).index(parameter)
                reads = [option.inputs[at] for option in self.space.options[node]]
                every = [held for read in reads for held in held_for(read)]
                found.append([p for p in every if self._allowed(node, parameter, p)])
        return [p for p in dict.fromkeys(found[0]) if all(p in one for one in found)]

    def _allowed(self, node: fx.Node, parameter: fx.Node, placement: Placement) -> bool:
        held = self.space.held(node, parameter, placement)
        return held is not None and held.placement == placement


def needed(plan: Plan) -> Iterator[Read]:
    """Each conversion once, and none to the placement that a value is made in.

    A segment knows only one placement of what it begins with. Another that it needs may be there.
    """
    there = {(node, option.output) for node, option in plan.options.items()}
    for read in plan.reads:
        if (read.value, read.target) not in there:
            there.add((read.value, read.target))
            yield read


def search(space: Space, result: fx.Node) -> Plan:
    """The cheapest plan. Without seeds there always is one: whole tensors."""
    found = _Search(space, result)
    if space.hubs:
        return found.refined(_with_hubs(found))
    rough = [plan for fixed in found.combinations() if (plan := found.plan(fixed, ROUGH))]
    most = min(plan.cost for plan in rough) * (1 + CLOSE)
    cheap = (found.refined(plan) for plan in rough if plan.cost <= most)
    return min(cheap, key=lambda plan: plan.cost)


def _with_hubs(search: _Search) -> Plan:
    """Each group of hubs in turn gets the placement in which the rest is cheapest, roughly."""
    best = search.cheapest(
        {**held, **dict.fromkeys(search.space.hubs, whole)}
        for whole in (Replicated(), Invariant())
        for held in search.combinations()
    )
    for group in search.space.groups:
        # Parts of a sum are added up once, not by each reader.
        every = [p for p in placements_of(search.space, group[0]) if not isinstance(p, Partial)]
        trials = ({**best.fixed, **dict.fromkeys(group, p)} for p in every)
        best = search.cheapest(trials, search.begun(best))
    return best
