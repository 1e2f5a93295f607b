"""Placements: where a value and its gradient are, on the devices that divide a region.

A divided region runs on every device of a group, each with its part of the work. Because a
placement says where the gradient is, too, each device differentiates its own part, and the
backward of a conversion between two placements is a conversion again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Invariant:
    """Whole and the same on all devices, and so is its gradient."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Whole and the same on all devices; the gradient is a part of a sum on each."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A part of a sum on each device; the gradient is whole and the same on all."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut along a dimension, and so is its gradient.

    The dimension is `blocks` blocks, and each block is cut in equal pieces. Fused q, k and v are
    three blocks; a flattened batch of cut sequences has a block for each row of the batch.

    `zigzag`: each block is cut in twice as many pieces as there are devices, and device i has
    pieces i and 2n-1-i. Under a causal mask, all devices then have equally much to do.
    """

    dim: int
    blocks: int = 1
    zigzag: bool = False

    def parts(self, ways: int) -> int:
        """Into how many pieces each block is cut."""
        return 2 * ways if self.zigzag else ways


@dataclass(frozen=True, slots=True)
class Shifted:
    """Cut, and each device has the piece of the one that is `steps` places before it in the ring.

    The gradient is where the value is.
    """

    cut: Cut
    steps: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Nobody reads it. Its gradient is that of the device before, which gets it back."""

    cut: Cut


@dataclass(frozen=True, slots=True)
class Constant:
    """Whole and the same on all devices, without a gradient: tokens, masks, rotary tables."""


Placement = Invariant | Replicated | Partial | Cut | Shifted | Returned | Constant


class Step(StrEnum):
    """What a conversion does in one direction."""

    NOTHING = "nothing"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SHIFT = "shift"  # each device sends what it has to the next one of the ring
    SHIFT_BACK = "shift-back"  # to the one before it
    SLICE = "slice"  # each device takes its piece of what is whole: no message


# What a conversion does in the forward and in the backward. Pairs that are missing do not exist.
STEPS: dict[tuple[type, type], tuple[Step, Step]] = {
    (Invariant, Replicated): (Step.NOTHING, Step.ALL_REDUCE),
    (Invariant, Cut): (Step.SLICE, Step.ALL_GATHER),
    (Cut, Invariant): (Step.ALL_GATHER, Step.SLICE),
    (Cut, Replicated): (Step.ALL_GATHER, Step.REDUCE_SCATTER),
    (Cut, Cut): (Step.ALL_TO_ALL, Step.ALL_TO_ALL),
    (Cut, Shifted): (Step.SHIFT, Step.SHIFT_BACK),
    (Cut, Returned): (Step.NOTHING, Step.SHIFT_BACK),
    (Shifted, Shifted): (Step.SHIFT, Step.SHIFT_BACK),
    (Partial, Invariant): (Step.ALL_REDUCE, Step.NOTHING),
    (Partial, Replicated): (Step.ALL_REDUCE, Step.ALL_REDUCE),
    (Partial, Cut): (Step.REDUCE_SCATTER, Step.ALL_GATHER),
    (Replicated, Cut): (Step.SLICE, Step.NOTHING),  # the backward pads with zeros
    (Constant, Cut): (Step.SLICE, Step.NOTHING),
    (Constant, Invariant): (Step.NOTHING, Step.NOTHING),
    (Constant, Replicated): (Step.NOTHING, Step.NOTHING),
}
LOCAL = (Step.NOTHING, Step.SLICE)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A value is read in another placement than it was written in."""

    source: Placement
    target: Placement

    @property
    def forward(self) -> Step:
        return STEPS[type(self.source), type(self.target)][0]

    @property
    def backward(self) -> Step:
        return STEPS[type(self.source), type(self.target)][1]

    @property
    def is_message(self) -> bool:
        """Whether any direction sends something."""
        if self.source == self.target:
            return False
        return not {self.forward, self.backward} <= set(LOCAL)


def exists(source: Placement, target: Placement) -> bool:
    """Whether one conversion leads from one placement to another.

    Pieces of one dimension in other blocks would not be equal. A ring is passed step by step.
    """
    if isinstance(target, Returned):
        return source == target.cut
    if isinstance(target, Shifted):
        before = target.cut if target.steps == 1 else Shifted(target.cut, target.steps - 1)
        return source == before
    if isinstance(source, Cut) and isinstance(target, Cut):
        return source.dim != target.dim
    return (type(source), type(target)) in STEPS


def local_shape(shape: Shape, placement: Placement, ways: int) -> Shape:
    """The shape of what one of `ways` devices holds.

    >>> local_shape((6, 8), Cut(1), 2)
    (6, 4)
    """
    if isinstance(placement, Shifted | Returned):
        return local_shape(shape, placement.cut, ways)
    if not isinstance(placement, Cut):
        return shape
    cut = shape[placement.dim]
    assert cut is not None, "a size that depends on data cannot be cut"
    return (*shape[: placement.dim], cut // ways, *shape[placement.dim + 1 :])


def divides(shape: Shape, placement: Placement, ways: int) -> bool:
    """Whether a value of this shape can have this placement."""
    if isinstance(placement, Shifted | Returned):
        return divides(shape, placement.cut, ways)
    if not isinstance(placement, Cut):
        return True
    if not 0 <= placement.dim < len(shape):
        return False
    size = shape[placement.dim]
    each = placement.blocks * placement.parts(ways)
    return bool(size) and size % each == 0  # type: ignore[operator]


# Bytes that a device sends, as a multiple of (ways - 1) / ways of the whole tensor.
_SENT = {Step.ALL_REDUCE: 2.0, Step.ALL_GATHER: 1.0, Step.REDUCE_SCATTER: 1.0}


def sent(step: Step, nbytes: int, ways: int) -> float:
    """Bytes that each device sends for a tensor of which the whole is `nbytes`.

    >>> sent(Step.ALL_REDUCE, 100, 2)
    100.0
    """
    if step is Step.ALL_TO_ALL:
        return nbytes / ways * (ways - 1) / ways
    if step in (Step.SHIFT, Step.SHIFT_BACK):
        return nbytes / ways
    return _SENT.get(step, 0.0) * nbytes * (ways - 1) / ways
