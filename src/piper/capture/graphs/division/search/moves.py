"""What each node may do, where shared parameters and hubs are placed in a given way."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from piper.capture.graphs.division.calls import Option, operands, tensors
from piper.capture.graphs.division.search.conversions import Conversions, Read, is_whole
from piper.capture.graphs.division.search.prices import flops
from piper.capture.graphs.division.search.space import held_for
from piper.capture.torch_private import is_view
from piper.ir.placement.placements import Cut, Partial, Placement


@dataclass(frozen=True, slots=True)
class Move:
    """An option of a node, and the activations it reads. The work includes conversions of hubs."""

    option: Option
    work: float
    reads: tuple[tuple[fx.Node, Placement], ...]
    hubs: tuple[Read, ...] = ()


Near = tuple[Placement | None, ...]
Known = dict[tuple[fx.Node, Near], list[Move]]


@dataclass
class Moves:
    """`held`: the placements of shared parameters and of hubs."""

    conversions: Conversions
    held: dict[fx.Node, Placement]

    known: Known = field(default_factory=dict)
    transitions: dict[Hashable, Any] = field(default_factory=dict)  # what steps have found

    def __post_init__(self) -> None:
        self.space = self.conversions.space

    def holding(self, held: dict[fx.Node, Placement]) -> Moves:
        """Others that are placed so. What does not depend on them is known already."""
        return replace(self, held=held)

    def of(self, node: fx.Node) -> list[Move]:
        """None, if a parameter is held in a way that the node cannot use."""
        key = node, self.near(node)
        if key not in self.known:
            every = (self._move(node, option) for option in self.space.options[node])
            self.known[key] = [move for move in every if move is not None]
        return self.known[key]

    def near(self, node: fx.Node) -> Near:
        """How shared parameters and hubs are placed that a node reads, and the node itself."""
        return tuple([self.held.get(one) for one in (node, *operands(node))])

    def least(self, node: fx.Node) -> float:
        """What a node costs at least."""
        return min(move.work for move in self.of(node))

    def output(self, node: fx.Node, move: Move) -> Placement:
        """A hub is converted where it is made."""
        return self.held.get(node, move.option.output)

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
        prices = [self.conversions.price(read.value, read.source, read.target) for read in hubs]
        known = [price for price in prices if price is not None]
        if len(known) < len(hubs):
            return None
        converted = tuple(read for read in hubs if read.source != read.target)
        return Move(option, work + sum(known), tuple(reads), converted)

    def _made(self, node: fx.Node, option: Option) -> Iterator[Read]:
        if node in self.held:
            yield Read(node, option.output, self.held[node])

    def _parameter(self, node: fx.Node, parameter: fx.Node, read: Placement) -> float | None:
        if parameter in self.held:
            return 0.0 if self.held[parameter] in held_for(read) else None
        held = self.space.held(node, parameter, read)
        return None if held is None else held.price

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
