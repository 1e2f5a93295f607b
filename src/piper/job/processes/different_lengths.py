"""Replicas whose batches have different shapes in one step, such as rows padded to their longest.

They must have equally many rows: these are numbered through all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piper.runtime.processes.wire_format import travels

Shapes = tuple[Any, ...]  # shape and dtype (or text) of each leaf of a batch, then their nesting


@travels
@dataclass(frozen=True)
class BatchForm:
    """What a process says of its batch."""

    feed: int
    shapes: Shapes
    flags: tuple[bool, ...]
    samples: int
    tokens: int | None


@dataclass(frozen=True)
class Lengths:
    """The shapes of each feed's batch, and what all have together."""

    shapes: tuple[Shapes, ...]
    samples: int
    tokens: int | None

    @property
    def sizes(self) -> tuple[int, int | None]:
        return self.samples, self.tokens


def together(forms: Sequence[BatchForm]) -> Lengths | None:
    """None: they differ in more than lengths."""
    first = forms[0]
    by_feed = {one.feed: one for one in forms}
    same = all(by_feed[one.feed] == one and one.flags == first.flags for one in forms)
    if not same or any(alike(one.shapes) != alike(first.shapes) for one in forms):
        return None
    ordered = [by_feed[feed] for feed in sorted(by_feed)]
    counts = [one.tokens for one in ordered if one.tokens is not None]
    tokens = sum(counts) if len(counts) == len(ordered) else None
    return Lengths(tuple(o.shapes for o in ordered), sum(o.samples for o in ordered), tokens)


def alike(shapes: Shapes) -> Shapes:
    """What the shapes of all replicas have in common: all but lengths.

    >>> alike((((8, 6), "int64"), "3", "TreeSpec(...)"))
    ((8, 2, 'int64'), '3', 'TreeSpec(...)')
    """
    return tuple(
        (*one[0][:1], len(one[0]), one[1]) if isinstance(one, tuple) else one for one in shapes
    )
