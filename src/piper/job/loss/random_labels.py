"""Labels for trials of a loss: those of the batch, and others that a later batch may have."""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor

from piper.capture.trace.trials.comparisons import Comparisons
from piper.job.batch.compared_values import beside
from piper.job.batch.sided_values import marked, sided

IGNORED = -100
NOTHING = Comparisons()


class Change(Enum):
    """What becomes of the labels of a batch, in the first of two halves."""

    NONE = auto()
    ERASED = auto()  # zeros
    IGNORED = auto()  # some are -100, which no batch had so far
    ALIKE = auto()  # all of one class, which the second half has with another one
    OTHERS = auto()  # the same with both classes exchanged
    WEIGHED = auto()  # numbers that are all 1 are others
    DRAWN = auto()  # integers and truths among the outputs are random
    MARKED = auto()  # some are NaN, or an integer that the loss leaves out
    MARKED_OTHERWISE = auto()  # another such integer
    COMPARED = auto()  # those that the loss compares with, and some beside them
    SMALL = auto()  # all on one side of these, and the second half on both
    LARGE = auto()  # on the other side

    @property
    def is_optional(self) -> bool:
        """Not all losses take such labels."""
        return self not in (Change.NONE, Change.ERASED)

    @property
    def rows(self) -> int:
        """That each half must have: two classes show nothing in two rows."""
        return 2 if self in (Change.ALIKE, Change.OTHERS) else 1


SPECIAL = (
    Change.MARKED, Change.MARKED_OTHERWISE, Change.COMPARED, Change.SMALL, Change.LARGE,
)  # fmt: skip


def changed(
    labels: Tensor,
    unit: int,
    change: Change,
    alone: bool = True,
    comparisons: Comparisons = NOTHING,
) -> Tensor:
    """So many rows for each half, or what all share. `alone`: there are no other labels.

    >>> changed(torch.tensor([3, 1]), 2, Change.ALIKE).tolist()
    [1, 1, 1, 3]
    """
    if not labels.dim():
        return labels
    some = labels.repeat(-(-2 * unit // len(labels)), *[1] * (labels.dim() - 1))[: 2 * unit].clone()
    if change is Change.ERASED:
        some[:unit] = 0
    if change is Change.IGNORED and some.dtype is torch.int64:
        first = some[:unit].view(-1)
        first[:: 2 if first.numel() > 2 else 1] = IGNORED
    is_mask = not alone and bool((some == 1).all())  # in which everything counts
    if change is Change.WEIGHED and is_mask and some.is_floating_point():
        return torch.rand(some.shape, generator=torch.Generator().manual_seed(0)).to(some) + 0.1
    if change in SPECIAL and not is_mask and comparisons != NOTHING:
        return special(some, change, comparisons)
    pair = None if is_mask else two_classes(some)
    if change in (Change.ALIKE, Change.OTHERS) and pair is not None:
        one, other = pair if change is Change.ALIKE else pair[::-1]
        some[:] = one
        some[unit:].view(-1)[1::2] = other
    return some


def special(labels: Tensor, change: Change, comparisons: Comparisons) -> Tensor:
    """Labels like these, with values that the loss asks for."""
    given = comparisons, torch.Generator().manual_seed(0)
    like = labels, tuple(labels.shape)
    if change is Change.COMPARED:
        return beside(*like, *given)
    if change in (Change.SMALL, Change.LARGE):
        return sided(*like, change is Change.LARGE, *given)
    return marked(*like, int(change is Change.MARKED_OTHERWISE), *given)


def two_classes(labels: Tensor) -> tuple[float, float] | None:
    """The smallest and the largest, or a neighbour that is probably one. None: they are no classes.

    >>> two_classes(torch.tensor([2, 7, 5])), two_classes(torch.tensor([4])), two_classes(
    ...     torch.tensor([0.0, 1.0])), two_classes(torch.tensor([0.5]))
    ((2, 7), (4, 3), (0.0, 1.0), None)
    """
    if not labels.numel() or labels.is_complex():
        return None
    low, high = labels.min().item(), labels.max().item()
    if labels.is_floating_point() or labels.dtype is torch.bool:
        return (0.0, 1.0) if bool(((labels == 0) | (labels == 1)).all()) else None
    if low < 0:
        return None
    return (low, high) if low < high else (low, low - 1 if low else 1)
