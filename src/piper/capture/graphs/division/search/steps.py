"""One node of a stretch: what it does to the values that are alive."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from piper.capture.graphs.division.calls import Option
from piper.capture.graphs.division.search.conversions import Available, Read
from piper.capture.graphs.division.search.moves import Move, Moves

State = tuple[Available, ...]  # of each value that is alive, in an order that all states share
Alive = dict[fx.Node, int]  # values, and for how many joined ones each stands


@dataclass(frozen=True, slots=True)
class Choice:
    """The option of one node, and the conversions that it is the first to need."""

    option: Option
    reads: tuple[Read, ...] = ()


@dataclass(frozen=True, slots=True)
class Transition:
    """A move, and what it costs with the conversions of what it reads.

    `after`: where the values it has read, if they stay alive, and its result are then available.
    """

    move: Move
    cost: float
    reads: tuple[Read, ...]
    after: State

    @property
    def choice(self) -> Choice:
        return Choice(self.move.option, (*self.reads, *self.move.hubs))


class Step:
    """A node among values that are alive: those it does not read keep where they are available.

    Many states differ in these only, so transitions are found once for what the node reads. Of
    values that are joined, the first stands for all.
    """

    def __init__(
        self, moves: Moves, node: fx.Node, alive: Alive, last: dict[fx.Node, fx.Node]
    ) -> None:
        self.moves, self.node = moves, node
        self.joined = moves.space.joined
        self.first = self.joined.get(node)
        self.least = moves.least(node)
        wanted = {self._first(operand) for move in moves.of(node) for operand, _ in move.reads}
        wanted.update(() if self.first is None else [self.first])
        values = list(alive)
        places = range(len(values))
        self.read = [k for k in places if values[k] in wanted]
        self.rest = [k for k in places if values[k] not in wanted and last[values[k]] is not node]
        self.operands = [values[k] for k in self.read]
        self.kept = [operand for operand in self.operands if last[operand] is not node]
        self.alive = {
            value: alive[value] for value in (*(values[k] for k in self.rest), *self.kept)
        }
        made = self._first(node)
        self.alive[made] = self.alive.get(made, 0) + 1
        self.bridges = [moves.conversions.bridges(*place) for place in self.alive.items()]
        same = node, moves.near(node), tuple(self.operands), tuple(self.kept)
        self.known: dict[State, list[Transition]] = moves.transitions.setdefault(same, {})

    def _first(self, operand: fx.Node) -> fx.Node:
        return self.joined.get(operand, operand)

    def after(self, state: State) -> tuple[State, list[Transition]]:
        """Where values that the node does not read are available, and what it may do."""
        given = tuple([state[k] for k in self.read])
        if given not in self.known:
            self.known[given] = self._transitions(given)
        return tuple([state[k] for k in self.rest]), self.known[given]

    def _transitions(self, given: State) -> list[Transition]:
        """Of those that end alike, the cheapest."""
        found: dict[State, Transition] = {}
        for move in self.moves.of(self.node):
            one = self._transition(move, dict(zip(self.operands, given, strict=True)))
            if one and (one.after not in found or one.cost < found[one.after].cost):
                found[one.after] = one
        return list(found.values())

    def _transition(self, move: Move, live: dict[fx.Node, Available]) -> Transition | None:
        """None: an argument cannot be converted."""
        conversions, made = self.moves.conversions, self.moves.output(self.node, move)
        wanted = [(operand, live[self._first(operand)], target) for operand, target in move.reads]
        if self.first is not None:
            (target,) = conversions.placements(live[self.first])
            wanted.append((self.node, conversions.bit(made), target))
        cost, reads = move.work, list[Read]()
        for operand, given, target in wanted:
            bit = conversions.bit(target)
            if not given & bit:
                source = conversions.cheapest(operand, given, target)
                if source is None:
                    return None
                cost += source[0]
                reads.append(Read(operand, source[1], target))
                if operand in live:
                    live[operand] |= bit
        after = tuple(live[operand] for operand in self.kept)
        after = after if self.first is not None else (*after, conversions.bit(made))
        return Transition(move, cost, tuple(reads), after)
