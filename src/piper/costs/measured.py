"""Times of regions that were measured, and what they say of regions that were not."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, permutations
from typing import Any, TypeVar

from piper.costs.estimate import UNITS, Rates, Work, structure_of, work_of
from piper.costs.modes import Mode
from piper.ir.model import Model
from piper.names import Phase


@dataclass(frozen=True, slots=True)
class RegionKey:
    """What a figure is of. Regions with equal code share one graph, so they take equally long."""

    code: str
    phase: Phase
    mode: Mode = Mode.EAGER


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds that were measured, and of what work: others are scaled by it."""

    seconds: float
    work: Work | None = None  # None: not counted, or read from a file that does not say
    structure: str | None = None  # of the region; None: the same


class Source(StrEnum):
    """Where a time comes from."""

    MEASURED = "measured"
    SCALED = "scaled"  # from others that were measured in this mode
    OTHER_MODE = "other mode"  # from figures of another mode, which nothing relates to this one
    ESTIMATED = "estimated"  # nothing that was measured says anything about it


Figures = Mapping[RegionKey, Figure]
CodePhase = tuple[str, Phase]
Works = Mapping[CodePhase, tuple[Work | None, str]]  # with the structure of the region
Group = tuple[Mode, Phase | None, str | None]
Ratios = Mapping[Group, float]
K = TypeVar("K")


def works_of(model: Model) -> Works:
    """What the regions of a model do, by code and phase; also if they are recomputed."""
    every = chain.from_iterable((one, *one.recomputed.values()) for one in model.regions)
    return {
        (code, phase): (work_of(model, region, phase), structure_of(model, region))
        for code, region in {region.code: region for region in every}.items()
        for phase in Phase
    }


def figures_of(works: Works, seconds: Mapping[CodePhase, float], mode: Mode) -> Figures:
    """What was measured in a mode, with the work that it is of."""
    return {
        RegionKey(*one, mode): Figure(taken, *works.get(one, (None, None)))
        for one, taken in seconds.items()
    }


@dataclass(frozen=True)
class Scales:
    """How measured figures relate to estimates, and modes to each other: medians of ratios."""

    figures: Figures
    rates: Rates

    def find(self, key: RegionKey, work: Work | None, structure: str) -> tuple[float, Source]:
        """Seconds of a region that was not measured in this mode."""
        others = [replace(key, mode=mode) for mode in Mode if mode != key.mode]
        known = {other: self.figures[other].seconds for other in others if other in self.figures}
        for other, seconds in known.items():
            if (other.mode, key.mode) in self.between_modes:
                return seconds * self.between_modes[other.mode, key.mode], Source.SCALED
        estimate = self.rates.estimate(work, key.phase, key.mode)
        ratios = self.of_units if work is None else self.of_estimates
        for group in groups(key, structure):
            if group in ratios:
                return estimate * ratios[group], Source.SCALED
        if known:
            return next(iter(known.values())), Source.OTHER_MODE
        for group in chain.from_iterable(groups(other, structure) for other in others):
            if group in ratios:
                return estimate * ratios[group], Source.OTHER_MODE
        return estimate, Source.ESTIMATED

    @cached_property
    def of_estimates(self) -> Ratios:
        """Measured over estimated seconds, of figures whose work is known."""
        counted = [(key, one) for key, one in self.figures.items() if one.work is not None]
        return medians(
            (group, one.seconds / expected)
            for key, one in counted
            if (expected := self.rates.estimate(one.work, key.phase, key.mode))
            for group in groups(key, one.structure)
        )

    @cached_property
    def of_units(self) -> Ratios:
        """Seconds of a unit of work: a region whose work was not counted is like the others."""
        return medians(
            (group, one.seconds / UNITS[key.phase])
            for key, one in self.figures.items()
            for group in groups(key, one.structure)
        )

    @cached_property
    def between_modes(self) -> Mapping[tuple[Mode, Mode], float]:
        """How much longer the same region and phase takes in the second mode."""
        same: dict[CodePhase, dict[Mode, float]] = {}
        for key, one in self.figures.items():
            same.setdefault((key.code, key.phase), {})[key.mode] = one.seconds
        return medians(
            ((a, b), row[b] / row[a])
            for row in same.values()
            for a, b in permutations(row, 2)
            if row[a]
        )


def groups(key: RegionKey, structure: str | None) -> Iterator[Group]:
    """What a figure is compared with, from the most alike to the least."""
    if structure is not None:
        yield key.mode, key.phase, structure
    yield key.mode, key.phase, None
    yield key.mode, None, None


def medians(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    found: dict[K, list[float]] = {}
    for key, ratio in pairs:
        found.setdefault(key, []).append(ratio)
    return {key: statistics.median(ratios) for key, ratios in found.items()}


def to_rows(figures: Figures) -> list[dict[str, Any]]:
    """For JSON."""
    return [{**asdict(key), **asdict(one)} for key, one in figures.items()]


def from_rows(rows: Iterable[Mapping[str, Any]]) -> dict[RegionKey, Figure]:
    """What `to_rows` made."""
    return {
        RegionKey(row["code"], Phase(row["phase"]), Mode(row.get("mode", Mode.EAGER))): Figure(
            row["seconds"], Work(**row["work"]) if row.get("work") else None, row.get("structure")
        )
        for row in rows
    }


def from_names(compute: Mapping[str, float]) -> dict[RegionKey, Figure]:
    """Files of older versions say "code phase", of eager regions, and nothing of their work.

    >>> from_names({"block F": 0.5})  # doctest: +ELLIPSIS
    {RegionKey(code='block', phase=<Phase.FORWARD: 'F'>, ...): Figure(seconds=0.5, ...)}
    """
    found = {}
    for name, seconds in compute.items():
        code, _, phase = name.rpartition(" ")
        found[RegionKey(code, Phase(phase))] = Figure(seconds)
    return found
