"""Where rows of a batch meet, or their places in it matter, as the calls of a forward show.

`h / h.abs().max()`, `h[:8]`, `h * (arange(len(h)) < 8)[:, None]`: a microbatch has rows of its own,
and numbers them from 0. The calls for a microbatch and for the whole batch show which sizes are
those of rows, and what happens along them. It is for models that are too large to be tried on
numbers, so what it does not know is left in peace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from piper.capture.trace.row_calls.both_calls import (
    ORDERS,
    Both,
    all_multiples,
    is_integer,
    sizes_of_rows,
)
from piper.capture.trace.row_calls.recorded_calls import RecordedCall, RowCounts, gradient
from piper.capture.trace.row_calls.row_choices import chooses_rows
from piper.capture.trace.row_calls.row_order import RowOrder
from piper.capture.trace.row_calls.row_writes import RowWrites
from piper.capture.trace.row_calls.summed_gradients import is_changed

PARTS = frozenset({
    "getitem", "narrow", "select", "index_select", "split", "split_with_sizes", "chunk", "unbind",
    "tensor_split", "hsplit", "vsplit", "pad", "constant_pad_nd", "unfold",
})  # fmt: skip
GETS = frozenset({
    "getitem", "gather", "take", "take_along_dim", "index_select", "permute_rows.default",
})  # fmt: skip
PUTS = frozenset({
    "setitem", "index_put", "scatter", "scatter_add", "index_add", "scatter_reduce", "index_copy",
    "index_reduce",
})  # fmt: skip
PADS = ("pad", "constant_pad_nd")
JOINS = ("cat", "concat", "concatenate", "vstack")
GIVEN = ("empty", "empty_strided")  # as parameters and batches come into a trace
OFFSETS = frozenset({
    "add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "clone", "long", "int", "to",
    "view", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "contiguous", "broadcast_to",
    "getitem", "repeat", "repeat_interleave", "cat", "stack", "meshgrid", "scatter", "index_copy",
    "argsort", "sort", "clamp", "pad", "expand_as", "view_as", "reshape_as", "type_as",
})  # fmt: skip
QUOTIENTS = ("floordiv", "floor_divide", "div")  # of places of several elements of each row
UNIQUE = frozenset({"unique", "unique2", "unique_dim", "unique_consecutive"})
LIKE_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to", "deepcopy"})
WITHOUT_VALUES = frozenset({
    "size", "dim", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_tensor", "numel", "len", "is_floating_point",
})  # fmt: skip
ALONG = frozenset({
    "softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax", "normalize",
    "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "fft_fft", "fft_ifft", "fft_rfft",
    "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2",
    "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_fftshift", "fft_ifftshift", "diff",
    "gradient", "glu", "gumbel_softmax", *ORDERS,
})  # fmt: skip
MEETING = frozenset({  # of what comes from all rows, and rows
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "pow",
    "itruediv", "rtruediv", "where", "masked_fill", "maximum", "minimum", "clamp", "cat", "stack",
    "matmul", "mm", "bmm", "linear", "addmm", "einsum", "rpow", "lerp", "addcmul", "addcdiv", "gt",
    "lt", "ge", "le", "eq", "ne", "scaled_dot_product_attention", "and", "or", "xor", "iand", "ior",
    "ixor", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "remainder", "mod", "fmod", "isin", "gather", "take_along_dim", "index_select",
})  # fmt: skip


class Kind(Enum):
    """What decides a value."""

    CONSTANT = auto()  # nothing that a model is given
    NUMBERS = auto()  # the same, with another value for each row
    MOVED = auto()  # such numbers in another order
    PLACES = auto()  # numbers of rows: integers
    ORDER = auto()  # of rows by what they are: integers
    SORTED = auto()  # rows in such an order
    ALIKE = auto()  # parameters, for each row the same
    FREE = auto()  # integers of the batch alone, such as masks
    DATA = auto()
    SUMMED = auto()  # gradients that are sums over rows
    OF_ALL = auto()  # all rows, in floating-point numbers


LIKE_DATA = (Kind.SORTED, Kind.ALIKE, Kind.SUMMED)
SUMS = (Kind.SUMMED, Kind.OF_ALL)
COUNTED = (Kind.NUMBERS, Kind.MOVED)
NUMBERED = {*COUNTED, Kind.PLACES, Kind.ORDER}


@dataclass(frozen=True, slots=True)
class Meeting:
    """The line where rows meet; or else, if `numbered`, where their places matter."""

    line: str
    numbered: bool


@dataclass
class RowPlaces:
    kinds: dict[Any, Kind] = field(default_factory=dict)  # of results, by the place of their call
    writes: RowWrites = field(default_factory=RowWrites)
    order: RowOrder = field(default_factory=RowOrder)
    behind: set[Any] = field(default_factory=set)  # rows behind what is no rows

    def first(
        self, own: Sequence[RecordedCall], every: Sequence[RecordedCall], rows: RowCounts
    ) -> Meeting | None:
        """The first call in which rows meet or are counted. Both call the same."""
        for place, pair in enumerate(zip(own, every, strict=True)):
            found = self.kind(both := Both(*pair, rows))
            if self.writes.is_at_fixed_rows(both) or self.is_behind(place, both):
                return Meeting(both.all.line, numbered=True)
            if self.order.is_torn(place, both):
                return Meeting(both.all.line, numbered=False)
            if isinstance(found, Meeting):
                return found
            if found is Kind.OF_ALL and both.gives_rows:  # a mean of all rows, for each of them
                return Meeting(both.all.line, numbered=False)
            if both.all.name in PARTS:
                self.writes.note(place, both)
            for k, sizes in enumerate(both.results):
                lost = found in COUNTED and not sizes
                values = found is Kind.ORDER and k == 0 and len(both.results) == 2  # `x.sort()`
                unique = both.all.name in UNIQUE and k > 0
                kind = Kind.SORTED if values else of_unique(both, k) if unique else found
                self.kinds[place, k] = Kind.CONSTANT if lost else kind
        return None

    def is_behind(self, place: int, both: Both) -> bool:
        """Whether rows are taken as they are behind others: `cat([zeros(5, n), h])[:len(h)]`."""
        if both.all.name in JOINS and both.own.sizes[0] and not next(both.inputs)[1]:
            sizes = sizes_of_rows(both.own.sizes[0], both.all.sizes[0])
            if sizes and not all_multiples(sizes, both.rows.own, both.rows.all):
                self.behind.add((place, 0))
        later = both.all.name in PARTS and both.all.inputs[0][0] in self.behind
        return later and both.takes_rows

    def kind(self, both: Both) -> Kind | Meeting:
        """Of the results."""
        name, inputs = both.all.name, list(both.inputs)
        known = [self.kinds.get(source, Kind.DATA) for source, _ in inputs]
        if both.all.function is gradient:
            return Kind.DATA if any(both.results) else Kind.SUMMED
        if is_changed(both, known, SUMS):
            return Meeting(both.all.line, numbered=False)
        if name in GIVEN:
            return Kind.FREE if both.is_integer else Kind.DATA
        if both.counts:
            return Kind.OF_ALL
        if name in WITHOUT_VALUES:
            return Kind.CONSTANT
        if name in LIKE_ANOTHER:
            known, inputs = known[:1], inputs[:1]
        if all(one in (Kind.CONSTANT, *COUNTED) for one in known):
            return constant(both, inputs, known)
        if NUMBERED.isdisjoint(known):
            if both.numbers_data:
                return Meeting(both.all.line, numbered=True)
            if moves_rows(both, known):
                return Meeting(both.all.line, numbered=False)
            return in_order(both, inputs, known)
        values = known[-1:] if both.all.puts and name in PUTS else []
        if name in GETS | PUTS and NUMBERED.isdisjoint([known[0], *values]) and inputs[0][1]:
            return reordered(both, known)
        if name in (*OFFSETS, *QUOTIENTS) and both.is_integer and Kind.ORDER in known:
            return Kind.ORDER
        if name in OFFSETS and both.is_integer:
            return Kind.PLACES
        return Meeting(both.all.line, numbered=True)


def of_unique(both: Both, place: int) -> Kind:
    """Of the numbers that rows have among the unique, or of how often each of these is there."""
    sizes = both.all.sizes[place]
    return Kind.OF_ALL if sizes is None or None in sizes[1] else Kind.ORDER


Inputs = list[tuple[Any, list[int]]]


def moves_rows(both: Both, known: list[Kind]) -> bool:
    """Whether values decide which rows are read, or where they are written."""
    moved = known[-1] if both.all.puts and both.all.name in PUTS else known[0]
    return moved in (Kind.DATA, Kind.SORTED) and not both.all.in_loss and chooses_rows(both)


def reordered(both: Both, known: list[Kind]) -> Kind | Meeting:
    """Of rows that are taken, or put, by numbers. Twice, they are where they were."""
    if Kind.MOVED in known:
        return Meeting(both.all.line, numbered=True)
    source = known[-1] if both.all.name in PUTS else known[0]
    if source is Kind.OF_ALL:  # how often the value of each row is there
        return source
    moved = Kind.ORDER in known and source in (Kind.DATA, Kind.FREE)
    return Kind.SORTED if moved else Kind.DATA


def in_order(both: Both, inputs: Inputs, known: list[Kind]) -> Kind | Meeting:
    """Rows in an order of their own stay in it, and must not meet those of the batch."""
    with_rows = {kind for (_, sizes), kind in zip(inputs, known, strict=True) if sizes}
    if Kind.SORTED in known and not {Kind.DATA, Kind.FREE}.isdisjoint(with_rows):
        return Meeting(both.all.line, numbered=False)
    plain: list[Kind] = [Kind.DATA if one in LIKE_DATA else one for one in known]
    found = (part if both.all.name in PARTS else together)(both, inputs, plain)
    if found is Kind.DATA and Kind.SUMMED in known and not any(both.results):
        return Kind.SUMMED
    if found is not Kind.DATA or not any(both.results):
        return found
    if with_rows and with_rows <= {Kind.CONSTANT, Kind.ALIKE}:
        return Kind.ALIKE
    return Kind.SORTED if Kind.SORTED in with_rows else found


def constant(both: Both, inputs: Inputs, known: list[Kind]) -> Kind:
    own = both.all.name in GETS and known[0] is Kind.CONSTANT and bool(inputs[0][1])
    counted = not NUMBERED.isdisjoint(known)
    numbers = both.counts_rows or begins(both) or (counted and not (own or both.repeats))
    if not any(both.results) and any(sizes for _, sizes in inputs) and not both.all.in_loss:
        return Kind.OF_ALL  # as many as there are rows, or a mean
    if not any(both.results) or not numbers:
        return Kind.CONSTANT
    return Kind.MOVED if both.moves or Kind.MOVED in known else Kind.NUMBERS


def begins(both: Both) -> bool:
    """Whether constants of some rows come behind others: `pad(ones(len(h) - 1), (1, 0))`."""
    if not both.all.inputs or not both.all.sizes:
        return False
    sizes = sizes_of_rows(both.own.sizes[0], both.all.sizes[0])
    if not all_multiples(sizes, both.rows.own, both.rows.all):
        return False
    pairs = zip(both.own.inputs, both.all.inputs, strict=True)
    given = [sizes_of_rows(own[1], every[1]) for own, every in pairs]
    some = any(not all_multiples(one, both.rows.own, both.rows.all) for one in given if one)
    return some and both.all.name in (*PADS, *JOINS)


def part(both: Both, inputs: Inputs, known: list[Kind]) -> Kind | Meeting:
    """Of some rows, by constant places. What other tensors choose is theirs."""
    rows, (first, *others) = inputs[0][1], known
    if both.mixes:  # `unfold` of images
        return Meeting(both.all.line, numbered=False)
    if both.is_unknown:
        return joined(known)
    whole = all(sorted(sizes) == sorted(rows) for sizes in both.results)
    if both.all.name in PADS and both.shifts:
        return Meeting(both.all.line, numbered=False)
    if both.all.name in PADS and not whole:
        return Meeting(both.all.line, numbered=True) if both.begins_later else first
    if others and not (rows and set(others) == {Kind.CONSTANT} and not any(both.results)):
        return joined(known)
    if not rows:  # a table with an entry for each row, up to a number of them
        numbers = Kind.PLACES if both.is_integer else Meeting(both.all.line, numbered=True)
        return numbers if any(both.results) else first
    if not any(both.results):  # `mask[0]`: masks may be all the same
        return Kind.FREE if first is Kind.FREE and both.is_integer else Kind.OF_ALL
    return first if whole or both.takes_rows else Meeting(both.all.line, numbered=True)


def together(both: Both, inputs: Inputs, known: list[Kind]) -> Kind | Meeting:
    """Of rows, and of what comes from all of them."""
    name, line = both.all.name, both.all.line
    rows = [sizes for _, sizes in inputs if sizes]
    if not rows or both.all.in_loss:
        return joined(known)
    if name in ALONG and both.is_along_rows:
        ranks = Kind.PLACES if name == "cumsum" else Kind.ORDER
        return ranks if both.is_integer else Meeting(line, numbered=False)
    table = name == "embedding" and bool(inputs[1][1])
    if both.mixes or table or (name == "isin" and rows[1:]):
        return Meeting(line, numbered=False)
    if any(both.results) and any(map(partial(meets, name), both.all.inputs, known)):
        return Meeting(line, numbered=False)
    found = Kind.DATA if Kind.DATA in known else joined(known)  # experts take counts of all rows
    pairs = zip(both.results, both.all.sizes, strict=True)
    if any(len(sizes) > 1 and not is_integer(one) for sizes, one in pairs) and found is Kind.DATA:
        return Meeting(line, numbered=False)  # pairs of rows
    lost = not any(both.results) and not both.is_unknown
    return Kind.OF_ALL if found in (Kind.DATA, Kind.FREE) and lost else found


def meets(name: str, given: tuple[Any, Any], known: Kind) -> bool:
    """Whether a value of all rows is used for rows. How many tokens an expert gets is not."""
    return known is Kind.OF_ALL and (name in MEETING or not is_integer(given[1]))


def joined(known: list[Kind]) -> Kind:
    for one in (Kind.OF_ALL, Kind.DATA, Kind.FREE):
        if one in known:
            return one
    return Kind.DATA
