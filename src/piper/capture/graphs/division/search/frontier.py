"""The cheapest choices for a stretch of a graph: dynamic programming along its frontier.

A state says in which placements each value that is still needed is available. Any of them can be
converted to others: q, k and v share one gather, and their gradients one reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from piper.capture.graphs.division.search.conversions import Bridges
from piper.capture.graphs.division.search.moves import Moves
from piper.capture.graphs.division.search.steps import Alive, Choice, State, Step, Transition
from piper.ir.placement.placements import Placement

WIDTHS = (50, 200, 2000)  # states that are kept: in a first run, and in those after it
SAME = 1 + 1e-9  # costs are equal up to rounding
RIVALS = 12  # cheaper states that each is compared with


class Trail(NamedTuple):
    """A list of choices; states share their beginnings. A tuple: very many are made."""

    before: Trail | None
    last: Transition

    def choices(self) -> list[Choice]:
        found = list[Choice]()
        trail: Trail | None = self
        while trail is not None:
            found.append(trail.last.choice)
            trail = trail.before
        return found[::-1]


Best = dict[State, tuple[float, Trail | None]]
Rival = tuple[State, float]  # a state, and what it costs


def no_better(found: Best, before: Best) -> bool:
    return all(
        state in before and before[state][0] <= cost * SAME for state, (cost, _) in found.items()
    )


@dataclass
class Frontier:
    """Runs through nodes in order. `entry`: the value that is alive before the first, if any.

    `last`: the last node that reads a value.
    """

    moves: Moves
    entry: fx.Node | None
    nodes: Sequence[fx.Node]
    last: dict[fx.Node, fx.Node]

    def __post_init__(self) -> None:
        self.firsts: dict[tuple[Placement | None, int], tuple[Best, bool]] = {}
        self.steps: list[Step] = []
        alive: Alive = {} if self.entry is None else {self.entry: 1}
        for node in self.nodes if all(map(self.moves.of, self.nodes)) else ():
            self.steps.append(Step(self.moves, node, alive, self.last))
            alive = self.steps[-1].alive

    def run(self, entry: Placement | None, widths: tuple[int, ...] = WIDTHS) -> Best:
        """The cheapest of all states after the last node that differ in what it gives.

        A few states find some way through; states that cannot be better than the worst result of
        that are then left out. More states are tried until all are kept, or until more of them find
        nothing better.
        """
        found, _ = self._first(entry, widths[0])
        for width in widths[1:]:
            before = found
            limit = max((cost for cost, _ in before.values()), default=math.inf)
            found, all_kept = self._run(entry, limit * SAME, width)
            if all_kept or no_better(found, before):
                break
        return found

    def _first(self, entry: Placement | None, width: int) -> tuple[Best, bool]:
        """A rough search has often made it already."""
        if (entry, width) not in self.firsts:
            self.firsts[entry, width] = self._run(entry, math.inf, width)
        return self.firsts[entry, width]

    def _run(self, entry: Placement | None, limit: float, width: int) -> tuple[Best, bool]:
        """The states after the last node, and whether none were left out to keep to `width`."""
        if not self.steps:  # parameters are held in a way that a node cannot use
            return {}, True
        start = () if entry is None else (self.moves.conversions.bit(entry),)
        states: Best = {start: (0.0, None)}
        all_kept = True
        ahead = sum(step.least for step in self.steps)
        for step in self.steps:
            ahead -= step.least
            states = self._pruned(step, _through(step, states, limit - ahead), width)
            all_kept = all_kept and len(states) < width
        return states, all_kept

    def _pruned(self, step: Step, found: Best, width: int) -> Best:
        """Without states that a cheaper one can be turned into for the difference."""
        kept: Best = {}
        rivals: list[Rival] = []
        for state in sorted(found, key=lambda state: found[state][0]):
            cost = found[state][0]
            if not _reached(step.bridges, rivals, state, cost):
                kept[state] = found[state]
                if len(rivals) < RIVALS:
                    rivals.append((state, cost))
            if len(kept) == width:
                break
        return kept


def _reached(bridges: list[Bridges], rivals: list[Rival], state: State, cost: float) -> bool:
    """Whether a rival can be turned into a state. Called most of all, so it is one loop.

    The last rival is mostly the most similar one.
    """
    for rival, less in reversed(rivals):
        left = cost - less
        for known, given, wanted in zip(bridges, rival, state, strict=True):
            if given != wanted and wanted & ~given:
                left -= known[given, wanted]
                if left < 0:
                    break
        else:
            return True
    return False


def _through(step: Step, states: Best, limit: float) -> Best:
    """All states behind a step that cost no more than the limit."""
    found: Best = {}
    for state, (cost, trail) in states.items():
        rest, transitions = step.after(state)
        for transition in transitions:
            total = cost + transition.cost
            if total <= limit:
                after = rest + transition.after
                known = found.get(after)
                if known is None or total < known[0]:
                    found[after] = total, Trail(trail, transition)
    return found
