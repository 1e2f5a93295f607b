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
from functools import partial
from typing import Any

from piper.capture.trace.recorded_calls import RecordedCall, RowCounts

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
PADS = ("pad", "constant_pad_nd")
GIVEN = ("empty", "empty_strided")  # as parameters and batches come into a trace
NUMBERING = frozenset({
    "arange", "range", "linspace", "eye", "tril_indices", "triu_indices", "diag", "randperm",
})  # fmt: skip
TRIANGLES = frozenset({"tril", "triu"})
OFFSETS = frozenset({
    "add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "clone", "long", "int", "to",
    "view", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "contiguous", "broadcast_to",
    "getitem", "repeat", "repeat_interleave", "cat", "stack", "meshgrid", "scatter", "index_copy",
    "argsort", "sort", "clamp", "pad", "expand_as", "view_as", "reshape_as", "type_as",
})  # fmt: skip
LIKE_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})
WITHOUT_VALUES = frozenset({
    "size", "dim", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_tensor", "numel", "len", "is_floating_point",
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


ROWS_FIRST = frozenset({  # along other dimensions, elements meet
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "interpolate", "group_norm", "instance_norm", "local_response_norm", "pixel_shuffle",
})  # fmt: skip
RECURRENT = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu"})
MATRICES = frozenset({  # of the last two dimensions
    "scaled_dot_product_attention", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_fftn", "linalg_pinv",
    "linalg_inv", "linalg_svd", "linalg_qr", "linalg_eigh", "linalg_cholesky", "linalg_solve",
    "linalg_lstsq", "linalg_matrix_norm", "inverse", "pinverse", "svd", "qr", "cholesky", "cov",
    "corrcoef", "linalg_multi_dot", "chain_matmul",
})  # fmt: skip
VIEWS = frozenset({"view", "reshape", "unflatten"})
TURNS = frozenset({
    "flip", "roll", "remainder", "mod", "fmod", "floor_divide", "floordiv", "rsub", "neg",
    "randperm", "argsort", "sort", "topk",
})  # fmt: skip


class Kind(Enum):
    """What decides a value."""

    CONSTANT = auto()  # nothing that a model is given
    NUMBERS = auto()  # the same, with another value for each row
    MOVED = auto()  # such numbers in another order
    PLACES = auto()  # numbers of rows, or their order: integers
    FREE = auto()  # integers of the batch alone, such as masks
    DATA = auto()
    OF_ALL = auto()  # all rows, in floating-point numbers


COUNTED = (Kind.NUMBERS, Kind.MOVED)
NUMBERED = {*COUNTED, Kind.PLACES}


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
    rows: RowCounts

    @property
    def inputs(self) -> Iterator[tuple[Any, list[int]]]:
        """The source of each tensor, and its sizes that are those of rows, or of some of them."""
        for (source, own), (_, every) in zip(self.own.inputs, self.all.inputs, strict=True):
            unknown = [0] * (every is not None and None in every[1])
            yield source, grown(own, every) + unknown

    @property
    def results(self) -> list[list[int]]:
        return [grown(*pair) for pair in zip(self.own.sizes, self.all.sizes, strict=True)]

    @property
    def is_unknown(self) -> bool:
        """Whether sizes of results follow from values."""
        return any(None in one[1] for one in self.all.sizes if one is not None)

    @property
    def takes_rows(self) -> bool:
        """Whether results have all rows, once or several times, by numbers that follow theirs, as
        `both[:len(x)]` of the rows of two views does."""
        every = zip(self.own.sizes, self.all.sizes, strict=True)
        pairs: list[tuple[float, float]] = []
        for own, all in every:
            pairs += sizes_of_rows(own, all)
        numbers = zip(self.own.numbers, self.all.numbers, strict=True)
        if self.all.name not in ("chunk", "tensor_split"):
            pairs += [(a, b) for a, b in numbers if a]
        return bool(pairs) and all_multiples(pairs, self.rows.own, self.rows.all)

    @property
    def row_dims(self) -> list[int]:
        """The dimensions of the first tensor that run over rows, from its last one, which is -1."""
        (_, own), (_, every) = self.own.inputs[0], self.all.inputs[0]
        if own is None or every is None:
            return []
        pairs = zip(own[1], every[1], strict=True)
        return [k - len(own[1]) for k, (a, b) in enumerate(pairs) if a != b]

    @property
    def mixes(self) -> bool:
        """Whether it computes along the dimension of rows, by what it is."""
        name, dims, size = self.all.name, self.row_dims, len(self.all.inputs[0][1][1])
        if not dims:
            return False
        if name in ROWS_FIRST:
            return dims != [-size]
        if name in RECURRENT:
            first = next((one for one in reversed(self.all.given) if isinstance(one, bool)), False)
            return size < 3 or dims != [-3 if first else -2]
        if name == "layer_norm":
            return any(dim >= 1 - len(self.all.numbers) for dim in dims)
        if name == "einsum":
            return self.is_contracted
        if name in VIEWS:
            sizes = [size for result in self.results for size in result]
            return any(size % self.rows.all for size in sizes)  # groups of rows
        return name in MATRICES and any(dim >= -2 for dim in dims)

    @property
    def is_contracted(self) -> bool:
        """Whether an `einsum` sums over rows, and has rows."""
        words = (one for one in self.all.given if isinstance(one, str) and "->" in one)
        terms, _, result = next(words, "").replace(" ", "").partition("->")
        pairs = zip(terms.split(","), self.own.inputs, self.all.inputs, strict=False)
        letters = {
            letter
            for term, (_, own), (_, every) in pairs
            for letter, a, b in zip(term, own[1], every[1], strict=False)
            if a != b
        }
        return not letters <= set(result) and bool(letters & set(result))

    @property
    def gives_rows(self) -> bool:
        """Whether a forward makes floating-point numbers for rows."""
        pairs = zip(self.results, self.all.sizes, strict=True)
        return not self.all.in_loss and any(s and not is_integer(one) for s, one in pairs)

    @property
    def moves(self) -> bool:
        """Whether numbers of rows are in another order."""
        given = self.all.numbers
        ordered = len(given) < 2 or (given[0] == 0 and given[2:] in ((), (1,)))
        return self.all.name in TURNS or (self.all.name == "arange" and not ordered)

    @property
    def counts_rows(self) -> bool:
        """Whether it gives another number to each row."""
        name, sizes = self.all.name, self.own.sizes[:1]
        if name in TRIANGLES and sizes and sizes[0] is not None:
            pairs = zip(sizes[0][1][-2:], self.all.sizes[0][1][-2:], strict=True)
            return any(a != b for a, b in pairs)
        along = name in RUNNING or name in ORDERS  # of what is drawn for each row, say
        return name in NUMBERING or (along and self.is_along_rows)

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
    def begins_later(self) -> bool:
        """Whether it adds rows before the first one. Numbers of the last dimension come first."""
        (_, own), (_, every) = self.own.inputs[0], self.all.inputs[0]
        dims = [k for k, (a, b) in enumerate(zip(own[1], every[1], strict=True)) if a != b]
        places = [2 * (len(own[1]) - 1 - dim) for dim in dims]
        return any(self.all.numbers[k] != 0 for k in places if k < len(self.all.numbers))

    @property
    def repeats(self) -> bool:
        """Whether numbers of all tokens become those of each row: `arange(rows * n) % n`."""
        if self.all.name not in ("remainder", "mod", "fmod") or not self.all.numbers:
            return False
        sizes = [size for result in self.results for size in result]
        return all(size // self.rows.all % self.all.numbers[0] == 0 for size in sizes)

    @property
    def is_integer(self) -> bool:
        return all(is_integer(one) for one in self.all.sizes if one is not None)


def sizes_of_rows(own: Any, every: Any) -> list[tuple[int, int]]:
    pairs = zip(own[1], every[1], strict=True) if own is not None and every is not None else ()
    return [(a, b) for a, b in pairs if a != b and a is not None and b is not None]


def all_multiples(pairs: Sequence[tuple[float, float]], own: int, every: int) -> bool:
    """Whether these are sizes of so many rows: 8 and 16 of two rows and four, not 8 and 8."""
    return all(a % own == 0 and a // own * every == b for a, b in pairs)


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

    def first(
        self, own: Sequence[RecordedCall], every: Sequence[RecordedCall], rows: RowCounts
    ) -> Meeting | None:
        """The first call in which rows meet or are counted. Both call the same."""
        for place, pair in enumerate(zip(own, every, strict=True)):
            found = self.kind(both := Both(*pair, rows))
            if isinstance(found, Meeting):
                return found
            if found is Kind.OF_ALL and both.gives_rows:  # a mean of all rows, for each of them
                return Meeting(both.all.line, numbered=False)
            for k, sizes in enumerate(both.results):
                lost = found in COUNTED and not sizes
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
        if name in LIKE_ANOTHER:
            known, inputs = known[:1], inputs[:1]
        if all(one in (Kind.CONSTANT, *COUNTED) for one in known):
            return constant(both, inputs, known)
        if NUMBERED.isdisjoint(known):
            return part(both, inputs, known) if name in PARTS else together(both, inputs, known)
        values = known[-1:] if name in PUTS else []
        if name in GETS | PUTS and NUMBERED.isdisjoint([known[0], *values]) and inputs[0][1]:
            own = Kind.MOVED not in known
            return Kind.DATA if own else Meeting(both.all.line, numbered=True)
        if name in OFFSETS and both.is_integer:
            return Kind.PLACES
        return Meeting(both.all.line, numbered=True)


Inputs = list[tuple[Any, list[int]]]


def constant(both: Both, inputs: Inputs, known: list[Kind]) -> Kind:
    own = both.all.name in GETS and known[0] is Kind.CONSTANT and bool(inputs[0][1])
    counted = not NUMBERED.isdisjoint(known)
    if not any(both.results) or not (both.counts_rows or (counted and not (own or both.repeats))):
        return Kind.CONSTANT
    return Kind.MOVED if both.moves or Kind.MOVED in known else Kind.NUMBERS


def part(both: Both, inputs: Inputs, known: list[Kind]) -> Kind | Meeting:
    """Of some rows, by constant places. What other tensors choose is theirs."""
    rows, (first, *others) = inputs[0][1], known
    if both.is_unknown:
        return joined(known)
    whole = all(sorted(sizes) == sorted(rows) for sizes in both.results)
    if both.all.name in PADS and not whole:
        return Meeting(both.all.line, numbered=True) if both.begins_later else first
    if others and not (rows and set(others) == {Kind.CONSTANT} and not any(both.results)):
        return joined(known)
    if not rows:  # a table with an entry for each row, up to a number of them
        numbers = Kind.PLACES if both.is_integer else Meeting(both.all.line, numbered=True)
        return numbers if any(both.results) else first
    if not any(both.results):  # `mask[0]`: masks may be all the same
        return first if both.is_integer else Kind.OF_ALL
    return first if whole or both.takes_rows else Meeting(both.all.line, numbered=True)


def together(both: Both, inputs: Inputs, known: list[Kind]) -> Kind | Meeting:
    """Of rows, and of what comes from all of them."""
    name, line = both.all.name, both.all.line
    rows = [sizes for _, sizes in inputs if sizes]
    if not rows or both.all.in_loss:
        return joined(known)
    if name in ALONG and both.is_along_rows:
        return Kind.PLACES if both.is_integer else Meeting(line, numbered=False)
    if both.mixes or (name == "roll" and len(both.all.numbers) < 2):
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
