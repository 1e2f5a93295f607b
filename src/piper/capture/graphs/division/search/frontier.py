"""The cheapest choices for a stretch of a graph: dynamic programming along its frontier.

A state says in which placements each value that is still needed is available. Any of them can be
converted to others: q, k and v share one gather, and their gradients one reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.calls import Option, operands, tensors
from piper.capture.graphs.division.search.prices import conversion_price, flops
from piper.capture.graphs.division.search.space import Space, held_for
from piper.capture.torch_private import is_view
from piper.ir.placement.division import DivisionRequest
from piper.ir.placement.placements import Cut, Invariant, Partial, Placement, Replicated

WIDTHS = (50, 200, 2000)  # states that are kept: in a first run, and in those after it
SAME = 1 + 1e-9  # costs are equal up to rounding
RIVALS = 12  # cheaper states that each is compared with

Available = frozenset[Placement]
State = tuple[tuple[fx.Node, Available], ...]


@dataclass(frozen=True, slots=True)
class Read:
    """A value in a placement, made from another placement that is available."""

    value: fx.Node
    source: Placement
    target: Placement

    def of(self, same: dict[fx.Node, fx.Node]) -> Read:
        """The same in an equal segment. A hub is one value for all of them."""
        return Read(same.get(self.value, self.value), self.source, self.target)


@dataclass(frozen=True, slots=True)
class Choice:
    """The option of one node, and the conversions that it is the first to need."""

    option: Option
    reads: tuple[Read, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """An option of a node, and the activations it reads. The work includes conversions of hubs."""

    option: Option
    work: float
    reads: tuple[tuple[fx.Node, Placement], ...]
    hubs: tuple[Read, ...] = ()


@dataclass(frozen=True, slots=True)
class Trail:
    """A list of choices; states share their beginnings."""

    before: Trail | None
    choice: Choice

    def choices(self) -> list[Choice]:
        found = list[Choice]()
        trail: Trail | None = self
        while trail is not None:
            found.append(trail.choice)
            trail = trail.before
        return found[::-1]


Best = dict[State, tuple[float, Trail | None]]


def no_better(found: Best, before: Best) -> bool:
    return all(
        state in before and before[state][0] <= cost * SAME for state, (cost, _) in found.items()
    )


def is_whole(placement: Placement) -> bool:
    return isinstance(placement, Invariant | Replicated)


@dataclass
class Frontier:
    """Runs through nodes in order. `held`: the placements of shared parameters and of hubs."""

    space: Space
    held: dict[fx.Node, Placement]
    widths: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        self.prices: dict[tuple[fx.Node, Placement, Placement], float | None] = {}
        self.sources: dict[
            tuple[fx.Node, Available, Placement], tuple[float | None, Placement | None]
        ] = {}
        self.moves: dict[fx.Node, list[Move]] = {}
        # Equal sets are one object: states are compared all the time, mostly with themselves.
        self.sets: dict[Available, Available] = {}
        self.bridges: dict[tuple[fx.Node, Available, Available], float] = {}

    def run(self, nodes: Sequence[fx.Node], entry: State, last: dict[fx.Node, fx.Node]) -> Best:
        """The cheapest of all states after the last node that differ in what it gives.

        `last`: the last node that reads a value. A few states find some way through; states that
        cannot be better than the worst result of that are then left out. More states are tried
        until all are kept, or until more of them find nothing better.
        """
        found, _ = self._run(nodes, entry, last, math.inf, self.widths[0])
        for width in self.widths[1:]:
            before = found
            limit = max((cost for cost, _ in before.values()), default=math.inf)
            found, all_kept = self._run(nodes, entry, last, limit * SAME, width)
            if all_kept or no_better(found, before):
                break
        return found

    def _run(
        self,
        nodes: Sequence[fx.Node],
        entry: State,
        last: dict[fx.Node, fx.Node],
        limit: float,
        width: int,
    ) -> tuple[Best, bool]:
        """The states after the last node, and whether none were left out to keep to `width`."""
        if not all(map(self._moves, nodes)):  # parameters are held in a way that a node cannot use
            return {}, True
        states: Best = {entry: (0.0, None)}
        all_kept = True
        ahead = sum(map(self._least, nodes))
        for node in nodes:
            ahead -= self._least(node)
            found: Best = {}
            for state, (cost, trail) in states.items():
                for after, more, choice in self._steps(node, dict(state), last):
                    total = cost + more
                    if total + ahead <= limit and (after not in found or total < found[after][0]):
                        found[after] = total, Trail(trail, choice)
            states = self._pruned(found, width)
            all_kept = all_kept and len(states) < width
        return states, all_kept

    def _least(self, node: fx.Node) -> float:
        """What a node costs at least."""
        return min(move.work for move in self._moves(node))

    def _steps(
        self, node: fx.Node, live: dict[fx.Node, Available], last: dict[fx.Node, fx.Node]
    ) -> Iterator[tuple[State, float, Choice]]:
        kept = [value for value in live if last[value] is not node]
        for move in self._moves(node):
            read = self._read(move, live)
            if read is None:
                continue
            cost, reads = read
            more = {one.value: self._one(live[one.value] | {one.target}) for one in reads}
            state = (
                *((value, more.get(value, live[value])) for value in kept),
                (node, self._one(frozenset({self.held.get(node, move.option.output)}))),
            )
            yield state, cost + move.work, Choice(move.option, (*reads, *move.hubs))

    def _read(self, move: Move, live: dict[fx.Node, Available]) -> tuple[float, list[Read]] | None:
        """What it costs to convert the arguments. None: it cannot be done."""
        cost, reads = 0.0, list[Read]()
        for operand, target in move.reads:
            if target not in live[operand]:
                price, source = self._cheapest(operand, live[operand], target)
                if price is None or source is None:
                    return None
                cost += price
                reads.append(Read(operand, source, target))
        return cost, reads

    def _moves(self, node: fx.Node) -> list[Move]:
        if node not in self.moves:
            every = (self._move(node, option) for option in self.space.options[node])
            self.moves[node] = [move for move in every if move is not None]
        return self.moves[node]

    def _move(self, node: fx.Node, option: Option) -> Move | None:
        work, reads, hubs = self._work(node, option), [], list(self._made(node, option))
        for operand, target in dict(zip(operands(node), option.inputs, strict=True)).items():
            if operand in self.space.parameters:
                price = self._parameter(node, operand, target)
                if price is None:
                    return None
                work += price
            elif operand in self.held:
                hubs.append(Read(operand, self.held[operand], target))
            elif operand not in self.space.free:
                reads.append((operand, target))
        prices = [self.price(read.value, read.source, read.target) for read in hubs]
        known = [price for price in prices if price is not None]
        if len(known) < len(hubs):
            return None
        converted = tuple(read for read in hubs if read.source != read.target)
        return Move(option, work + sum(known), tuple(reads), converted)

    def _made(self, node: fx.Node, option: Option) -> Iterator[Read]:
        """A hub is converted where it is made."""
        if node in self.held:
            yield Read(node, option.output, self.held[node])

    def _parameter(self, node: fx.Node, parameter: fx.Node, read: Placement) -> float | None:
        if parameter in self.held:
            return 0.0 if self.held[parameter] in held_for(read) else None
        held = self.space.held(node, parameter, read)
        return None if held is None else held.price

    def _cheapest(
        self, node: fx.Node, sources: Available, target: Placement
    ) -> tuple[float | None, Placement | None]:
        key = node, sources, target
        if key not in self.sources:
            found = [(self.price(node, source, target), source) for source in sources]
            known = [(price, repr(source), source) for price, source in found if price is not None]
            price, _, source = min(known, default=(None, "", None))
            self.sources[key] = price, source
        return self.sources[key]

    def price(self, node: fx.Node, source: Placement, target: Placement) -> float | None:
        key = node, source, target
        if key not in self.prices:
            self.prices[key] = self._price(*key)
        return self.prices[key]

    def _price(self, node: fx.Node, source: Placement, target: Placement) -> float | None:
        request = self.space.requests.get(node) or self._reader(node)
        if request is None or isinstance(value(node), list | tuple):
            return 0.0 if source == target else None  # several tensors: their items are converted
        size = value(node).nbytes
        price = conversion_price(self.space.start, source, target, size, request.ways)
        gathered = request.what == "tokens" and is_whole(target) and not is_whole(source)
        return price + self.space.prices.whole * size if price and gathered else price

    def _reader(self, node: fx.Node) -> DivisionRequest | None:
        readers = (self.space.requests.get(user) for user in node.users)
        return next((request for request in readers if request is not None), None)

    def _work(self, node: fx.Node, option: Option) -> float:
        request, prices = self.space.requests.get(node), self.space.prices
        if request is None or request.what == "experts":
            return 0.0
        ways = request.ways
        written = 0 if is_view(node) else sum(tensor.nbytes for tensor in tensors(node))
        divided = any(isinstance(p, Cut) for p in (*option.inputs, option.output))
        # Parts of a product are sent at once, and not kept.
        sent = divided and isinstance(option.output, Partial)
        part = ways if sent or isinstance(option.output, Cut) else 1
        work = flops(node) / (ways if divided else 1)
        whole = request.what == "tokens" and is_whole(option.output)
        price = prices.whole if whole else prices.written
        return price * written / part + prices.flop * work

    def _pruned(self, found: Best, width: int) -> Best:
        """Without states that a cheaper one can be turned into for the difference."""
        kept: Best = {}
        rivals: list[tuple[dict[fx.Node, Available], float]] = []
        for state in sorted(found, key=lambda state: found[state][0]):
            cost = found[state][0]
            if not any(self._reaches(rival, state, cost - less) for rival, less in rivals):
                kept[state] = found[state]
                if len(rivals) < RIVALS:
                    rivals.append((dict(state), cost))
            if len(kept) == width:
                break
        return kept

    def _one(self, found: Available) -> Available:
        return self.sets.setdefault(found, found)

    def _reaches(self, live: dict[fx.Node, Available], state: State, limit: float) -> bool:
        for node, wanted in state:
            given = live[node]
            if given is not wanted:
                limit -= self._bridge(node, given, wanted)
                if limit < 0:
                    return False
        return True

    def _bridge(self, node: fx.Node, given: Available, wanted: Available) -> float:
        """What it costs to have a value in all wanted placements; infinite if it cannot be."""
        key = node, given, wanted
        if key not in self.bridges:
            prices = [self._cheapest(node, given, target)[0] for target in wanted - given]
            self.bridges[key] = sum(math.inf if price is None else price for price in prices)
        return self.bridges[key]
