"""Where the elements of a model's tensors lie in the tensors of files, which may be others."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from piper.runtime.state.element_runs import ElementRun, Overlap, overlaps

Shapes = Mapping[str, tuple[int, ...]]


class Segment(NamedTuple):
    """Elements that are contiguous in a tensor of the model and in one of the files."""

    start: int  # in the tensor of the model
    length: int
    source: str  # the name of the tensor in the files
    offset: int  # in that one


@dataclass(frozen=True)
class Stored:
    """A tensor of the model, as files have it."""

    shape: tuple[int, ...]
    segments: tuple[Segment, ...]  # by where they start

    @property
    def is_whole(self) -> bool:
        """Whether every element is there once."""
        at = 0
        for one in self.segments:
            if one.start != at:
                return False
            at += one.length
        return at == prod(self.shape)


Layout = Mapping[str, Stored]  # by a name in the model
Arrange = Callable[[Shapes], Layout]  # from the tensors that files have


@dataclass(frozen=True)
class Written:
    """The tensors that files get, and where those of the model lie in them."""

    shapes: Shapes
    layout: Layout

    def is_complete(self, own: Shapes) -> bool:
        """Whether every element of the model is written once, and nothing else."""
        sizes = Counter[str]()
        for stored in self.layout.values():
            for one in stored.segments:
                sizes[one.source] += one.length
        same = {name: one.shape for name, one in self.layout.items()} == own
        whole = all(one.is_whole for one in self.layout.values())
        return same and whole and sizes == {n: prod(shape) for n, shape in self.shapes.items()}


def whole(source: str, shape: tuple[int, ...]) -> Stored:
    return Stored(shape, (Segment(0, prod(shape), source, 0),))


def as_they_are(shapes: Shapes) -> Layout:
    """The tensors of the files are those of the model."""
    return {name: whole(name, shape) for name, shape in shapes.items()}


def in_sources(
    runs: Sequence[ElementRun], segments: Sequence[Segment]
) -> Iterator[tuple[Segment, Overlap]]:
    """Where runs of a part lie: an overlap of the part and the source of a segment.

    >>> halves = [Segment(0, 4, "a", 0), Segment(4, 4, "b", 0)]
    >>> [(one.source, tuple(both)) for one, both in in_sources([ElementRun(2, 4, 0)], halves)]
    [('a', (0, 2, 2)), ('b', (2, 0, 2))]
    """
    starts = [one.start for one in segments]
    pieces = [ElementRun(one.start, one.length, one.start) for one in segments]
    for both in overlaps(runs, pieces):
        one = segments[bisect_right(starts, both.target) - 1]
        yield one, Overlap(both.source, both.target - one.start + one.offset, both.length)
