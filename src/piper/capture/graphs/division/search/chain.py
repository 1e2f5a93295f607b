"""The cheapest way through a chain of segments. Repeated layers all get the same placements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.capture.graphs.division.search.segments import Matrix, Segment, Solution
from piper.ir.placement.placements import Placement

Near = dict[int, set[Placement | None]]  # by the key of segments
Costs = dict[Placement | None, float]
Ends = dict[Placement | None, tuple[float, tuple[Solution, ...]]]  # by the placement at the end


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` equal groups of `period` segments. A count of 1 is no repetition."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def cheapest(segments: Sequence[Segment], matrix: Callable[[Segment], Matrix]) -> Ends:
    """The cheapest solutions of all segments, for each placement of the last value."""
    ends: Ends = {None: (0.0, ())}
    for repeat in repeats([segment.key for segment in segments]):
        group = [matrix(segment) for segment in segments[repeat.start : repeat.end]]
        ends = _through(ends, group) if repeat.count == 1 else _repeated(ends, group, repeat)
    return ends


def near(segments: Sequence[Segment], matrix: Callable[[Segment], Matrix], close: float) -> Near:
    """By segments' keys, where they begin on one of the cheapest ways through all of them.

    `close`: how much more such a way may cost, as a part of what the segment costs. Equal segments
    share what is found.
    """
    found: Near = {}
    matrices = [matrix(segment) for segment in segments]
    ahead = _ahead(matrices)
    behind: Costs = {None: 0.0}
    best = min(ahead[0].values())
    for segment, one, rest in zip(segments, matrices, ahead, strict=True):
        most = best + close * min(_least(row, None) for row in one.values())
        cheap = [entry for entry in behind if behind[entry] + rest.get(entry, math.inf) <= most]
        found.setdefault(segment.key, set()).update(cheap)
        behind = _behind(one, behind)
    return found


def _behind(matrix: Matrix, before: Costs) -> Costs:
    """The least cost of each placement at the end of a segment."""
    found: Costs = {}
    for entry, cost in before.items():
        for end, solution in matrix.get(entry, {}).items():
            found[end] = min(cost + solution.cost, found.get(end, math.inf))
    return found


def _ahead(matrices: Sequence[Matrix]) -> list[Costs]:
    """For each segment, what it and all that follow cost at least, by its entry."""
    found: list[Costs] = []
    rest: Costs | None = None
    for matrix in reversed(matrices):
        rest = {entry: _least(row, rest) for entry, row in matrix.items()}
        found.append(rest)
    return found[::-1]


def _least(row: Mapping[Placement, Solution], rest: Costs | None) -> float:
    """`rest`: what follows costs, by its entry. None: nothing follows."""
    every = (
        one.cost + (0.0 if rest is None else rest.get(end, math.inf)) for end, one in row.items()
    )
    return min(every, default=math.inf)


def _through(ends: Ends, matrices: Sequence[Matrix]) -> Ends:
    """An equal segment elsewhere may begin in placements that this one was not solved for."""
    for matrix in matrices:
        found: Ends = {}
        for entry, (cost, path) in ends.items():
            for end, solution in matrix.get(entry, {}).items():
                total = cost + solution.cost
                if end not in found or total < found[end][0]:
                    found[end] = total, (*path, solution)
        ends = found
    return ends


def _repeated(ends: Ends, group: Sequence[Matrix], repeat: Repeat) -> Ends:
    """Every layer begins and ends alike, or every second one if that is cheaper."""
    once = _layers(ends, group[: repeat.period], repeat.count)
    if repeat.count % 2 and once:
        return once
    twice = {} if repeat.count % 2 else _layers(ends, group[: 2 * repeat.period], repeat.count // 2)
    return _cheaper(once, twice) if once and twice else once or twice or _through(ends, group)


def _cheaper(once: Ends, twice: Ends) -> Ends:
    """Unequal neighbours only if they gain something."""
    best = min(cost for cost, _ in once.values())
    other = min((cost for cost, _ in twice.values()), default=best)
    return twice if other < best * 0.99 else once


def _layers(ends: Ends, layer: Sequence[Matrix], count: int) -> Ends:
    found: Ends = {}
    for entry, (cost, path) in ends.items():
        through = _through({entry: (0.0, ())}, layer)
        if entry in through:
            more, solutions = through[entry]
            found[entry] = cost + count * more, (*path, *(solutions * count))
    return found


def repeats(keys: Sequence[int]) -> Iterator[Repeat]:
    """Where groups of segments repeat; the rest as groups that come once.

    >>> [(r.start, r.period, r.count) for r in repeats([7, 1, 2, 1, 2, 1, 2, 9])]
    [(0, 1, 1), (1, 2, 3), (7, 1, 1)]
    """
    yield from _repeats(keys, 0, len(keys))


def _repeats(keys: Sequence[int], start: int, end: int) -> Iterator[Repeat]:
    best = _longest(keys, start, end)
    if best is None:
        if start < end:
            yield Repeat(start, end - start, 1)
        return
    yield from _repeats(keys, start, best.start)
    yield best
    yield from _repeats(keys, best.end, end)


def _longest(keys: Sequence[int], start: int, end: int) -> Repeat | None:
    """The repetition that covers most; of equal ones, that of the shortest group."""
    best: Repeat | None = None
    for period in range(1, (end - start) // 2 + 1):
        equal = 0
        for k in range(start, end - period):
            equal = equal + 1 if keys[k] == keys[k + period] else 0
            count = equal // period + 1
            covered = best.period * best.count if best else 1
            if count > 1 and period * count > covered:
                best = Repeat(k + 1 - equal, period, count)
    return best
