"""What is known of a value in the graph of a loss: how it depends on the rows of a microbatch."""

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class PerRow:
    """Divided by the number of rows, or by a multiple of it."""


@dataclass(frozen=True, slots=True)
class Total:
    """Divided by `value`, a function of the sum `total` over rows of the batch's own tensors; or by
    so many times that sum itself."""

    total: fx.Node
    value: fx.Node
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Average:
    """A mean over rows that is divided by `value`, a mean over rows of the batch's own tensors."""

    value: fx.Node
    zeroed: bool = False  # whether it is 0 where `value` is 0, and not NaN


@dataclass(frozen=True, slots=True)
class Labels:
    """Divided by the number of labels that are not ignored, or by their class weights."""

    labels: fx.Node
    ignored: int
    weight: fx.Node | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Divided by the number of elements that a mask chooses."""

    mask: fx.Node
    alone: bool = True  # whether only these are summed: if there are none, gradients are zero


Divisor = PerRow | Total | Average | Labels | Chosen


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same for every microbatch."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number, or a tensor, that is proportional to the number of rows, or to its inverse (-1)."""

    power: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimension `dim` runs over rows, and each element depends on its own row only."""

    dim: int
    over: Divisor | None = None  # all elements are divided by this
    mask: fx.Node | None = None  # only the rows that this mask chooses


@dataclass(frozen=True, slots=True)
class Inner:
    """The same, in so many groups of all rows, one after the other: tokens first, then rows."""

    dim: int
    groups: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one row alone gives: the one at this place, or each of them, one after the other."""

    place: int | None


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """0, 1, 2, ... for the rows of the microbatch: an index, and nothing else.

    With a mask, only where it chooses; one of several indices, if it has several dimensions.
    """

    mask: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """How many elements a mask chooses, or a multiple of it, as a number."""

    mask: fx.Node


@dataclass(frozen=True, slots=True)
class Reduced:
    """A sum of terms, each a sum over all rows that is divided. Without divisors, a plain sum."""

    over: tuple[Divisor, ...] = ()


@dataclass(frozen=True, slots=True)
class Root:
    """A norm over rows, or a multiple of it: to this power, it is a sum over them."""

    power: float


@dataclass(frozen=True, slots=True)
class OfTotal:
    """A function of `total`, which is a sum over rows of the batch's own tensors."""

    total: fx.Node


@dataclass(frozen=True, slots=True)
class Mixed:
    """Depends on the rows in some other way."""


Known = Fixed | Number | Rows | Inner | Row | RowNumbers | Size | Reduced | Root | OfTotal | Mixed
FIXED, MIXED, SUM, MEAN = Fixed(), Mixed(), Reduced(), Reduced((PerRow(),))


def over_of(known: Known) -> tuple[Divisor, ...]:
    return known.over if isinstance(known, Reduced) else ()


def is_function(one: Divisor) -> bool:
    """The shares of microbatches then do not add up to 1: a constant would be scaled by them."""
    return isinstance(one, Total) and one.value is not one.total


def plus(a: Known, b: Known) -> Known:
    """The sum of two reduced values, or of one and a constant."""
    if Mixed() in (a, b):
        return MIXED
    if a == FIXED or b == FIXED:
        other = b if a == FIXED else a
        return MIXED if other == SUM or any(map(is_function, over_of(other))) else other
    if not isinstance(a, Reduced) or not isinstance(b, Reduced) or (a == SUM) != (b == SUM):
        return MIXED
    return Reduced(tuple(dict.fromkeys((*a.over, *b.over))))


def scaled(known: Known, power: int) -> Known:
    """A value times the number of rows, or divided by it (-1)."""
    match known, power:
        case Reduced(()), -1:
            return MEAN
        case Reduced((PerRow(),)), 1:
            return SUM
        case Rows(dim, None, mask), -1:
            return Rows(dim, PerRow(), mask)
        case Fixed(), _:
            return Number(power)
        case _:
            return MIXED
