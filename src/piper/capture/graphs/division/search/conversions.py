"""What conversions of a value cost, from any of the placements in which it is available."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.graphs.division.search.prices import conversion_price
from piper.capture.graphs.division.search.space import Space
from piper.ir.placement.division import DivisionRequest
from piper.ir.placement.placements import Invariant, Placement, Replicated

Available = int  # a set of placements, one bit each: states are compared all the time
Source = tuple[float, Placement]  # what a conversion costs, and from where it is made


@dataclass(frozen=True, slots=True)
class Read:
    """A value in a placement, made from another placement that is available."""

    value: fx.Node
    source: Placement
    target: Placement

    def of(self, same: dict[fx.Node, fx.Node]) -> Read:
        """The same in an equal segment. A hub is one value for all of them."""
        return Read(same.get(self.value, self.value), self.source, self.target)


@dataclass
class Conversions:
    """Everything is computed once. `every`: the placement of each bit."""

    space: Space
    every: list[Placement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bits: dict[Placement, Available] = {}
        self.prices: dict[tuple[fx.Node, Placement, Placement], float | None] = {}
        self.sources: dict[tuple[fx.Node, Available, Placement], Source | None] = {}
        self.known: dict[tuple[fx.Node, int], Bridges] = {}

    def bit(self, placement: Placement) -> Available:
        if placement not in self.bits:
            self.bits[placement] = 1 << len(self.every)
            self.every.append(placement)
        return self.bits[placement]

    def placements(self, available: Available) -> list[Placement]:
        return [one for k, one in enumerate(self.every) if available >> k & 1]

    def cheapest(self, node: fx.Node, given: Available, target: Placement) -> Source | None:
        """None: it cannot be made from any of those."""
        key = node, given, target
        if key not in self.sources:
            found = [
                (self.price(node, source, target), source) for source in self.placements(given)
            ]
            known = [(price, repr(source), source) for price, source in found if price is not None]
            price, _, source = min(known, default=(None, "", None))
            self.sources[key] = None if price is None or source is None else (price, source)
        return self.sources[key]

    def bridges(self, node: fx.Node, count: int) -> Bridges:
        """Of a value that stands for so many."""
        return self.known.setdefault((node, count), Bridges(self, node, count))

    def bridge(self, node: fx.Node, given: Available, wanted: Available) -> float:
        """What it costs to have a value in all wanted placements; infinite if it cannot be."""
        targets = self.placements(wanted & ~given)
        found = [self.cheapest(node, given, target) for target in targets]
        return sum(math.inf if source is None else source[0] for source in found)

    def price(self, node: fx.Node, source: Placement, target: Placement) -> float | None:
        key = node, source, target
        if key not in self.prices:
            self.prices[key] = self._price(*key)
        return self.prices[key]

    def _price(self, node: fx.Node, source: Placement, target: Placement) -> float | None:
        request = self.space.requests.get(node) or self._reader(node)
        if request is None or isinstance(value(node), list | tuple):
            return 0.0 if source == target else None  # several tensors: their items are converted
        if value(node).is_complex() and source != target:
            return None  # messages are of real numbers
        size = value(node).nbytes
        price = conversion_price(self.space.start, source, target, size, request.ways)
        gathered = request.what == "tokens" and is_whole(target) and not is_whole(source)
        return price + self.space.prices.whole * size if price and gathered else price

    def _reader(self, node: fx.Node) -> DivisionRequest | None:
        readers = (self.space.requests.get(user) for user in node.users)
        return next((request for request in readers if request is not None), None)


class Bridges(dict[tuple[Available, Available], float]):
    """What it costs to have `count` values like one where they are wanted, by where they are."""

    def __init__(self, conversions: Conversions, node: fx.Node, count: int) -> None:
        super().__init__()
        self.conversions, self.node, self.count = conversions, node, count

    def __missing__(self, key: tuple[Available, Available]) -> float:
        self[key] = self.count * self.conversions.bridge(self.node, *key)
        return self[key]


def is_whole(placement: Placement) -> bool:
    return isinstance(placement, Invariant | Replicated)
