"""Where rows of a batch meet, or their places in it matter, as the calls of a forward show.

`h / h.abs().max()`, `h[:8]`, `h * (arange(len(h)) < 8)[:, None]`: a microbatch has rows of its own,
and numbers them from 0. The calls for a microbatch and for the whole batch show which sizes are
those of rows, and what happens along them. It is for models that are too large to be tried on
numbers, so what it does not know is left in peace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from piper.capture.trace.recorded_calls import RecordedCall

PARTS = frozenset({
    "getitem", "narrow", "select", "index_select", "split", "split_with_sizes", "chunk", "unbind",
    "tensor_split", "hsplit", "vsplit", "pad", "constant_pad_nd", "unfold",
})  # fmt: skip
GETS = frozenset({
    "getitem", "gather", "take", "take_along_dim", "index_select", "permute_rows.default",
})  # fmt: skip
PUTS = frozenset({
    "setitem", "index_put", "scatter", "scatter_add", "index_add", "scatter_reduce",
})  # fmt: skip
GIVEN = ("empty", "empty_strided")  # as parameters and batches come into a trace
NUMBERING = frozenset(
    {"arange", "range", "linspace", "eye", "tril_indices", "triu_indices", "diag"}
)
TRIANGLES = frozenset({"tril", "triu"})
OFFSETS = frozenset({
    "add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "clone", "long", "int", "to",
    "view", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "contiguous", "broadcast_to",
    "getitem", "repeat", "repeat_interleave", "cat", "stack", "meshgrid", "scatter", "index_copy",
    "argsort", "sort",
})  # fmt: skip
LIKE_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})
WITHOUT_VALUES = frozenset({
    "size", "dim", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_tensor", "get", "numel", "len", "is_floating_point",
})  # fmt: skip
ORDERS = frozenset({"argsort", "sort", "topk", "msort", "cumsum"})  # integers: places of rows
ALONG = frozenset({
    "softmax", "log_softmax", "softmin", "normalize", "cumprod", "cummax", "cummin", "logcumsumexp",
    "flip", "fft_fft", "fft_ifft", "fft_rfft", "diff", *ORDERS,
})  # fmt: skip
RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp"})
MEETING = frozenset({  # of what comes from all rows, and rows
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "pow",
    "itruediv", "rtruediv", "where", "masked_fill", "maximum", "minimum", "clamp", "cat", "stack",
    "matmul", "mm", "bmm", "linear", "addmm", "einsum", "rpow", "lerp", "addcmul", "addcdiv", "gt",
    "lt", "ge", "le", "scaled_dot_product_attention",
})  # fmt: skip


class Kind(Enum):
    """What decides a value."""

    CONSTANT = auto()  # nothing that a model is given
    NUMBERS = auto()  # the same, with another value for each row
    PLACES = auto()  # numbers of rows, or their order: integers
    FREE = auto()  # integers of the batch alone, such as masks
    DATA = auto()
    OF_ALL = auto()  # all rows, in floating-point numbers


NUMBERED = {Kind.NUMBERS, Kind.PLACES}


@dataclass(frozen=True, slots=True)
class Meeting:
    """The line where rows meet; or else, if `numbered`, where their places matter."""

    line: str
    numbered: bool


@dataclass(frozen=True, slots=True)
class Both:
    """A call for a microbatch, and the same one for the whole batch."""

    own: RecordedCall
    all: RecordedCall

    @property
    def inputs(self) -> Iterator[tuple[Any, list[int]]]:
        """The source of each tensor, and its sizes that are those of rows."""
        for (source, own), (_, every) in zip(self.own.inputs, self.all.inputs, strict=True):
            yield source, grown(own, every)

    @property
    def results(self) -> list[list[int]]:
        return [grown(*pair) for pair in zip(self.own.sizes, self.all.sizes, strict=True)]

    @property
    def counts_rows(self) -> bool:
        """Whether it gives another number to each row."""
        name, sizes = self.all.name, self.own.sizes[:1]
        if name in TRIANGLES and sizes and sizes[0] is not None:
            pairs = zip(sizes[0][1][-2:], self.all.sizes[0][1][-2:], strict=True)
            return any(a != b for a, b in pairs)
        return name in NUMBERING or (name in RUNNING and self.is_along_rows)

    @property
    def is_along_rows(self) -> bool:
        """Whether it works along rows: its first number is a dimension, and otherwise the last."""
        (_, own), (_, every) = self.own.inputs[0], self.all.inputs[0]
        if own is None or every is None or not own[1]:
            return False
        given = [n for n in self.all.numbers if isinstance(n, int)]
        numbers = given[1:] if self.all.name == "topk" else given
        dim = numbers[0] if numbers and -len(own[1]) <= numbers[0] < len(own[1]) else -1
        return bool(own[1][dim] != every[1][dim])

    @property
    def is_integer(self) -> bool:
        return all(is_integer(one) for one in self.all.sizes if one is not None)


def grown(own: Any, every: Any) -> list[int]:
    """The sizes of all rows, or of some of them."""
    if own is None or every is None:
        return []
    return [b for a, b in zip(own[1], every[1], strict=True) if a != b and b is not None]


def is_integer(described: Any) -> bool:
    return "int" in described[0] or "bool" in described[0]


@dataclass
class RowPlaces:
    kinds: dict[Any, Kind] = field(default_factory=dict)  # of results, by the place of their call

    def first(self, own: Sequence[RecordedCall], every: Sequence[RecordedCall]) -> Meeting | None:
        """The first call in which rows meet or are counted. Both call the same."""
        for place, pair in enumerate(zip(own, every, strict=True)):
            found = self.kind(both := Both(*pair))
            if isinstance(found, Meeting):
                return found
            for k, sizes in enumerate(both.results):
                lost = found is Kind.NUMBERS and not sizes
                self.kinds[place, k] = Kind.CONSTANT if lost else found
        return None

    def kind(self, both: Both) -> Kind | Meeting:
        """Of the results."""
        name, inputs = both.all.name, list(both.inputs)
        known = [self.kinds.get(source, Kind.DATA) for source, _ in inputs]
        if name in GIVEN:
            return Kind.FREE if both.is_integer else Kind.DATA
        if name in WITHOUT_VALUES:
            return Kind.CONSTANT
        known = known[:1] if name in LIKE_ANOTHER else known
        if all(one in (Kind.CONSTANT, Kind.NUMBERS) for one in known):
            return constant(both, inputs, known)
        if NUMBERED.isdisjoint(known):
            return part(both, inputs, known) if name in PARTS else together(both, inputs, known)
        values = known[-1:] if name in PUTS else []
        if name in GETS | PUTS and NUMBERED.isdisjoint([known[0], *values]) and inputs[0][1]:
            return Kind.DATA  # each row finds its own
        if name in OFFSETS and both.is_integer:
            return Kind.PLACES
        return Meeting(both.all.line, numbered=True)


Inputs = list[tuple[Any, list[int]]]


def constant(both: Both, inputs: Inputs, known: list[Kind]) -> Kind:
    own = both.all.name in GETS and known[0] is Kind.CONSTANT and bool(inputs[0][1])
    numbers = both.counts_rows or (Kind.NUMBERS in known and not own)
    return Kind.NUMBERS if numbers and any(both.results) else Kind.CONSTANT


def part(both: Both, inputs: Inputs, known: list[Kind]) -> Kind | Meeting:
    """Of some rows, by constant places. What other tensors choose is theirs."""
    rows, (first, *others) = inputs[0][1], known
    if others and not (rows and set(others) == {Kind.CONSTANT} and not any(both.results)):
        return joined(known)
    if not rows:  # a table with an entry for each row, up to a number of them
        numbers = Kind.PLACES if both.is_integer else Meeting(both.all.line, numbered=True)
        return numbers if any(both.results) else first
    whole = all(sorted(sizes) == sorted(rows) for sizes in both.results)
    of_one = both.is_integer and not any(both.results)  # `mask[0]`: of masks that are all the same
    return first if whole or of_one else Meeting(both.all.line, numbered=True)


def together(both: Both, inputs: Inputs, known: list[Kind]) -> Kind | Meeting:
    """Of rows, and of what comes from all of them."""
    name, line = both.all.name, both.all.line
    rows = [sizes for _, sizes in inputs if sizes]
    if not rows or both.all.in_loss:
        return joined(known)
    if name in ALONG and both.is_along_rows:
        return Kind.PLACES if both.is_integer else Meeting(line, numbered=False)
    if name == "roll" and len(both.all.numbers) < 2:
        return Meeting(line, numbered=False)
    if Kind.OF_ALL in known and name in MEETING and any(both.results):
        return Meeting(line, numbered=False)
    found = Kind.DATA if Kind.DATA in known else joined(known)  # experts take counts of all rows
    pairs = zip(both.results, both.all.sizes, strict=True)
    if any(len(sizes) > 1 and not is_integer(one) for sizes, one in pairs) and found is Kind.DATA:
        return Meeting(line, numbered=False)  # pairs of rows
    return Kind.OF_ALL if found is Kind.DATA and not any(both.results) else found


def joined(known: list[Kind]) -> Kind:
    for one in (Kind.OF_ALL, Kind.DATA, Kind.FREE):
        if one in known:
            return one
    return Kind.DATA
