"""One call for a microbatch beside the same call for the whole batch, and what it does to rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.nn import functional

from piper.capture.trace.row_calls.along_dims import worked_along
from piper.capture.trace.row_calls.recorded_calls import RecordedCall, RowCounts

NUMBERING = frozenset({
    "arange", "range", "linspace", "eye", "tril_indices", "triu_indices", "diag", "randperm",
    "logspace", "hann_window", "hamming_window", "blackman_window", "bartlett_window",
    "kaiser_window",
})  # fmt: skip
TRIANGLES = frozenset({"tril", "triu"})
ORDERS = frozenset({"argsort", "sort", "topk", "msort", "cumsum"})  # integers: places of rows
RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp"})
ROWS_FIRST = frozenset({  # along other dimensions, elements meet
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_avg_pool3d", "adaptive_max_pool3d", "lp_pool1d", "lp_pool2d", "lp_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d", "max_unpool1d", "max_unpool2d",
    "max_unpool3d", "upsample", "upsample_nearest", "upsample_bilinear", "pixel_unshuffle",
    "channel_shuffle", "grid_sample", "fold",
    "interpolate", "group_norm", "instance_norm", "local_response_norm", "pixel_shuffle",
})  # fmt: skip
RECURRENT = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu"})
MATRICES = frozenset({  # of the last two dimensions
    "linalg_pinv",
    "linalg_inv", "linalg_svd", "linalg_qr", "linalg_eigh", "linalg_cholesky", "linalg_solve",
    "linalg_lstsq", "linalg_matrix_norm", "inverse", "pinverse", "svd", "qr", "cholesky", "cov",
    "corrcoef", "linalg_multi_dot", "chain_matmul",
})  # fmt: skip
WORKING = frozenset({"rot90", "roll", "layer_norm", "rms_norm", "renorm", "flipud", "fliplr"})
VIEWS = frozenset({"reshape", "view", "reshape_as", "view_as", "resize"})
FILLED = frozenset({"full", "new_full", "full_like", "fill"})  # with a value, after sizes
SIZED = frozenset({
    "getitem", "narrow", "select", "size", "empty", "new_empty", "zeros", "new_zeros", "deepcopy",
})  # fmt: skip
TURNS = frozenset({
    "flip", "roll", "remainder", "mod", "fmod", "floor_divide", "floordiv", "rsub", "neg",
    "randperm", "argsort", "sort", "topk",
})  # fmt: skip


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
        return [k - len(own[1]) for k in places_of_rows(own[1], every[1])]

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
        if name == "multi_head_attention_forward":  # of time, rows and features
            return size < 3 or dims != [-2]
        if name == "unfold" and self.all.function is functional.unfold:
            return dims != [-size]
        if name in WORKING:
            return not worked_along(self.all, size).isdisjoint(dims)
        if name == "einsum":
            return self.is_contracted
        if name in VIEWS:
            return self.is_wrong_view
        if name == "scaled_dot_product_attention":  # keys of rows, for queries
            keys = self.own.inputs[1][1][1], self.all.inputs[1][1][1]
            return -2 in (*dims, *(k - len(keys[0]) for k in places_of_rows(*keys)))
        if name == "as_strided":
            return dims != [-size] or not self.has_strides_of_rows
        return name in MATRICES and any(dim >= -2 for dim in dims)

    @property
    def is_wrong_view(self) -> bool:
        """Whether a dimension of rows is where another one was: `h.T.reshape(h.shape)`. Where it
        is one with others, as of all tokens, it may be any of them."""
        given, result = self.all.inputs[0][1][1], self.all.sizes[0][1]
        before = places_of_rows(self.own.inputs[0][1][1], given)
        after = places_of_rows(self.own.sizes[0][1], result)
        if len(before) != 1 or len(after) != 1 or given[before[0]] != result[after[0]]:
            return False
        outer = given[: before[0]], result[: after[0]]
        return not any(None in one for one in outer) and prod(outer[0]) != prod(outer[1])

    @property
    def has_strides_of_rows(self) -> bool:
        """Whether the first dimension of an `as_strided` goes from row to row, and others stay in
        it."""
        sizes, numbers = self.all.sizes[0][1], self.all.numbers
        rank, row = len(sizes), prod(self.all.inputs[0][1][1][1:])
        if rank == 0 or self.results[0] != [sizes[0]] or numbers[rank] != row:
            return False
        strides, first = numbers[rank + 1 : 2 * rank], sum(numbers[2 * rank :])
        last = sum((size - 1) * step for size, step in zip(sizes[1:], strides, strict=True))
        return bool(first + last < row)

    @property
    def numbers_data(self) -> bool:
        """Whether what becomes of a row depends on its place: `h.triu()`, `h.fill_diagonal_(0)`."""
        if not self.all.inputs or self.all.name not in (*TRIANGLES, "fill_diagonal"):
            return False
        return any(dim >= -2 for dim in self.row_dims)

    @property
    def is_contracted(self) -> bool:
        """Whether an `einsum` sums over rows, and has rows."""
        words = (one for one in self.all.given if isinstance(one, str))
        terms, arrow, result = next(words, "").replace(" ", "").partition("->")
        if not arrow:  # letters that occur once
            result = "".join(one for one in terms if terms.count(one) == 1)
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
    def counts(self) -> bool:
        """Whether the number of rows becomes a value: `torch.tensor(len(x))`, `norm / len(x)`."""
        own, every = self.own.numbers, self.all.numbers
        if self.all.in_loss or own == every or not self.all.sizes:
            return False
        if self.all.name in FILLED:
            return own[-1] != every[-1]
        return self.own.sizes == self.all.sizes and self.all.name not in SIZED

    @property
    def counts_rows(self) -> bool:
        """Whether it gives another number to each row."""
        name, sizes = self.all.name, self.own.sizes[:1]
        if name in TRIANGLES and sizes and sizes[0] is not None:
            pairs = zip(sizes[0][1][-2:], self.all.sizes[0][1][-2:], strict=True)
            return any(a != b for a, b in pairs)
        if name == "one_hot" and sizes and sizes[0] is not None:
            return bool(sizes[0][1][-1] != self.all.sizes[0][1][-1])
        along = name in RUNNING or name in ORDERS  # of what is drawn for each row, say
        return name in NUMBERING or (along and self.is_along_rows)

    @property
    def is_along_rows(self) -> bool:
        """Whether it works along rows."""
        dims, every = self.row_dims, self.all.inputs[0][1]
        return bool(dims) and not worked_along(self.all, len(every[1])).isdisjoint(dims)

    @property
    def begins_later(self) -> bool:
        """Whether it adds rows before the first one, or takes some away."""
        return any(before for before, _ in self.padding)

    @property
    def shifts(self) -> bool:
        """Whether it adds rows on one side, and takes as many away on the other."""
        return any(before and before == -after for before, after in self.padding)

    @property
    def padding(self) -> Iterator[tuple[float, float]]:
        """Of the dimensions of rows, on both sides. Numbers of the last dimension come first."""
        numbers = self.all.numbers
        for dim in self.row_dims:
            at = 2 * (-1 - dim)
            if at + 1 < len(numbers):
                yield numbers[at], numbers[at + 1]

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


def places_of_rows(own: Sequence[Any], every: Sequence[Any]) -> list[int]:
    """The dimensions in which two sizes differ, or which follow from values, which may be rows."""
    pairs = zip(own, every, strict=True)
    return [k for k, (a, b) in enumerate(pairs) if a != b or b is None]


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
