"""What a forward calls, to tell whether it calls the same with another number of rows.

Python code may branch on the number of rows: `if len(x) > 5`, `min(len(x), 6)`, `x[:6]`. A graph
shows only the way that its microbatch takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from piper.capture.source_lines import current_line
from piper.capture.torch_private import has_values, is_symbolic, symbols_of

ARITHMETIC = frozenset({
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv",
    "floordiv", "floor_divide", "pow", "float_power", "mod", "remainder", "fmod", "radd", "rmul",
    "rtruediv", "rfloordiv", "rpow", "rmod", "iadd", "isub", "imul", "itruediv", "ipow", "clamp",
    "clamp_min", "clamp_max", "clip", "addcmul", "addcdiv", "lerp", "masked_fill", "fill",
    "full_like", "where", "softplus", "leaky_relu", "dropout", "roll",
})  # fmt: skip

COMPARISONS = frozenset({"gt", "lt", "ge", "le", "eq", "ne"})


def gradient() -> None:
    """Stands for what a backward is given, among the calls."""


SMALL = 64  # elements of a constant that are compared
PLAIN = (str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
Number = int | float


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of torch: which function, on what, and the sizes of its results."""

    function: Any
    given: tuple[Any, ...]  # where tensors come from, and all else that is no number
    numbers: tuple[Number, ...]
    sizes: tuple[Any, ...]  # of the results, with their types
    gradients: bool
    in_loss: bool
    line: str
    inputs: tuple[tuple[Any, Any], ...] = field(
        compare=False
    )  # sources of tensors, and their sizes
    writes: bool = field(compare=False, default=False)  # to its first tensor
    written: Any = field(compare=False, default=None)  # the part that `x[...] = y` writes to
    backward: bool = field(compare=False, default=False)  # of the user
    puts: bool = field(compare=False, default=True)  # whether its last argument is a tensor

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "").strip("_")


class RecordedCalls(torch.overrides.TorchFunctionMode):
    """Records calls, with their lines. `outputs` grows before the loss."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
        self.outputs, self.before, self.backward = outputs, len(outputs), False
        self.silent = False  # whether calls are not those of the model
        self.calls = list[RecordedCall]()
        self.places = dict[int, Any]()  # of tensors, by id: the call that gave it, or its number
        self.alive = list[Tensor]()  # ids are used again for others
        self.symbols = dict[Any, Any]()  # of `.item()`: the call that gave it

    @contextmanager
    def of_backward(self, gradients: Sequence[Any]) -> Iterator[None]:
        """What the user's own backward calls, after the gradients that it is given."""
        before = self.silent, self.backward
        self.silent, self.backward = False, True
        self.keep(gradient, [], [one for one in gradients if isinstance(one, Tensor)], ())
        yield
        self.silent, self.backward = before

    def __exit__(self, *error: Any) -> None:
        self.places, self.alive = {}, []
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self.silent or torch.compiler.is_dynamo_compiling():  # it traces this inside torch.cond
            return found
        results, given = list(flat(found)), list(flat((args, kwargs)))
        quiet = found is None or is_symbolic(found)  # no_grad and the like touch no tensor
        touched = given if quiet else results
        if any(isinstance(one, Tensor) for one in touched):
            self.keep(func, given, results, args)
        return found

    def keep(self, func: Any, given: list[Any], results: list[Any], args: Any) -> None:
        place = len(self.calls)
        given = [*given, *self.constants(given)]
        numbers = tuple(one for one in given if is_number(one))
        others = tuple(self.source(one) for one in given if not is_number(one))
        sizes = tuple(described(one) for one in results)
        in_loss = len(self.outputs) > self.before and not self.backward
        how = torch.is_grad_enabled(), in_loss
        inputs = tuple((self.source(t), described(t)) for t in given if isinstance(t, Tensor))
        inputs += tuple(self.numbers(func, given))
        part = written(*args[:2]) if func is torch.Tensor.__setitem__ else None
        writes = part is not None or (bool(given) and any(one is given[0] for one in results))
        self.calls.append(
            RecordedCall(
                func,
                others,
                numbers,
                sizes,
                *how,
                current_line(),
                inputs,
                writes,
                part,
                self.backward,
                bool(args) and isinstance(args[-1], Tensor),
            )  # fmt: skip
        )
        for k, one in enumerate(results):
            if isinstance(one, Tensor):
                self.places[id(one)] = (place, k)
                self.alive.append(one)
            self.symbols.update((symbol, (place, k)) for symbol in symbols_of(one))

    def numbers(self, func: Any, given: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Numbers that `.item()` gave, where they are computed with."""
        if getattr(func, "__name__", "").strip("_") in ARITHMETIC | COMPARISONS:
            for one in given:
                found = (self.symbols.get(symbol) for symbol in symbols_of(one))
                yield from ((source, described(one)) for source in found if source is not None)

    def constants(self, given: list[Any]) -> Iterator[Any]:
        """The elements of small constants that no call gave."""
        for one in given:
            if isinstance(one, Tensor) and id(one) not in self.places:
                yield from elements(one)

    def source(self, one: Any) -> Any:
        """Where a tensor comes from. Those that no call gave are numbered by their first use."""
        if not isinstance(one, Tensor):
            return one if isinstance(one, PLAIN) else repr(type(one))
        if id(one) not in self.places:
            self.places[id(one)] = f"given {len(self.places)}"
            self.alive.append(one)
        return self.places[id(one)]


def flat(value: Any) -> Iterator[Any]:
    """The leaves of arguments, through lists, dicts and slices."""
    match value:
        case list() | tuple():
            for one in value:
                yield from flat(one)
        case dict():
            for name, one in value.items():
                yield name
                yield from flat(one)
        case slice():
            yield from ("slice", value.start, value.stop, value.step)
        case numpy.ndarray() | numpy.generic() if value.size <= SMALL:
            yield from flat(value.tolist())
        case _:
            yield value


def elements(one: Tensor) -> Iterator[Any]:
    """Of a small constant. Tensors of a trace have no values."""
    if has_values(one) and 0 < one.numel() <= SMALL:
        yield from flat(one.tolist())


def written(target: Tensor, index: Any) -> Any:
    """The type and the sizes of a part of a tensor, if sizes alone decide them."""
    try:
        return described(target[index])
    except Exception:  # it has as many elements as a mask has true ones
        return str(target.dtype), (None,)


def is_number(one: Any) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool)


def described(one: Any) -> Any:
    """The type and the sizes of a tensor. Sizes that depend on values are not known."""
    if is_symbolic(one):
        return type(one).__name__.lower(), ()
    if not isinstance(one, Tensor):
        return None
    return str(one.dtype), tuple(n if isinstance(n, int) else None for n in one.shape)


EXPANSIONS = ("expand", "expand_as", "broadcast_to")


def without_expansions(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Many models expand a tensor only if there are several rows."""
    found, places = list[RecordedCall](), dict[Any, Any]()
    for number, one in enumerate(calls):
        inputs = tuple((places.get(source, source), sizes) for source, sizes in one.inputs)
        if one.name in EXPANSIONS and inputs:
            places[number, 0] = inputs[0][0]
            continue
        places.update({(number, k): (len(found), k) for k in range(len(one.sizes))})
        given = tuple(places.get(it, it) if isinstance(it, tuple) else it for it in one.given)
        found.append(replace(one, given=given, inputs=inputs))
    return found


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The rows of a microbatch, and those of the whole batch."""

    own: int
    all: int

    def first_difference(
        self, one: Sequence[RecordedCall], other: Sequence[RecordedCall]
    ) -> RecordedCall | None:
        """The first call, of all rows, that is another one than that of the microbatch."""
        for a, b in zip(one, other, strict=False):
            if not self.same(a, b):
                return b
        longer = max(one, other, key=len)
        return longer[min(len(one), len(other))] if len(one) != len(other) else None

    def same(self, a: RecordedCall, b: RecordedCall) -> bool:
        if a == b:
            return True
        if (a.function, a.given, a.gradients) != (b.function, b.given, b.gradients):
            return False
        return self.same_sizes(a.sizes, b.sizes) and self.same_numbers(a, b)

    def same_sizes(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        return len(one) == len(other) and all(map(self.same_tensor, one, other))

    def same_tensor(self, one: Any, other: Any) -> bool:
        if one is None or other is None:
            return one is other
        kinds, dims = one[0] == other[0], len(one[1]) == len(other[1])
        return kinds and dims and all(map(self.follows, one[1], other[1]))

    def same_numbers(self, a: RecordedCall, b: RecordedCall) -> bool:
        """A number that scales rows is none of their sizes. Where no rows are, it makes a mean."""
        if len(a.numbers) != len(b.numbers):
            return False
        if a.name not in ARITHMETIC:
            return all(map(self.follows, a.numbers, b.numbers))
        if a.sizes != b.sizes and not a.in_loss:
            return a.numbers == b.numbers
        return all(map(self.is_scaled, a.numbers, b.numbers))

    def follows(self, one: Number | None, other: Number | None) -> bool:
        """Whether a size is one of so many rows: a multiple of them, and something beside it."""
        if one == other:
            return True
        if not isinstance(one, int) or not isinstance(other, int):
            return False
        return (other - one) % (self.all - self.own) == 0 or one * self.all == other * self.own

    def is_scaled(self, one: Number, other: Number) -> bool:
        """Whether a number is the same, or in proportion to rows, or to their inverse."""
        if one == other:
            return True
        most = 1e-9 * max(abs(one * self.all), abs(other * self.all))
        pairs = (one * self.all, other * self.own), (one * self.own, other * self.all)
        return any(abs(x - y) <= most for x, y in pairs)
