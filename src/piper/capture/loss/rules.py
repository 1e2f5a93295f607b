"""What operators do to rows, for the proof that a loss is a mean or a sum over them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import value
from piper.capture.loss.calls import Call, aligned, base_name, shape
from piper.capture.loss.domain import (
    FIXED,
    MEAN,
    MIXED,
    SUM,
    Average,
    Chosen,
    Fixed,
    Known,
    Mixed,
    Number,
    OfTotal,
    Reduced,
    Root,
    RowNumbers,
    Rows,
    Size,
    Total,
    plus,
    scaled,
)
from piper.capture.loss.scaled_rows import scaled_rows

Rule = Callable[[Call], Known]
RULES: dict[str, Rule] = {}
NONE, MEANS, SUMS = 0, 1, 2  # torch's numbers for reductions


def rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


# Element by element


def elementwise(call: Call) -> Known:
    """Any function of one element of each argument."""
    found = [call.of(name) for name in call.given]
    if all(one == FIXED for one in found):
        return FIXED
    if all(isinstance(one, Fixed | Rows) for one in found):
        over = any(isinstance(one, Rows) and one.over is not None for one in found)
        return scaled_rows(call) if over else aligned(call, list(call.given))
    return function_of_total(call)


def function_of_total(call: Call) -> Known:
    """A function of one sum over rows, as in `mask.sum().clamp(min=1)`."""
    totals = {total_of(call, name) for name in call.tensors if call.of(name) != FIXED}
    numbers = any(isinstance(call.of(n), Number | Mixed) for n in call.given)
    (total,) = totals if len(totals) == 1 else (None,)
    return MIXED if total is None or numbers else OfTotal(total)


def total_of(call: Call, name: str) -> fx.Node | None:
    """The sum over rows of the batch's own tensors that an argument is, or is a function of."""
    match call.of(name):
        case OfTotal(total):
            return total
        case Reduced(()) if call.is_own(name):
            node = call.given[name]
            return node if isinstance(node, fx.Node) else None
    return None


@rule(
    "clone", "contiguous", "detach", "alias", "to", "_to_copy", "type_as", "neg", "negative",
    "positive", "lift_fresh", "lift_fresh_copy", "double", "float",
)  # fmt: skip
def same(call: Call) -> Known:
    """A sum that does not fit into its type, as in `mask.sum().bool()`, is a function of it."""
    first = next(iter(call.given))
    source, found = call.given[first], value(call.node)
    if isinstance(source, fx.Node) and isinstance(found, Tensor):
        before = value(source)
        if isinstance(before, Tensor) and is_narrower(before.dtype, found.dtype):
            return elementwise(call)
    return call.of(first)


def is_narrower(before: torch.dtype, found: torch.dtype) -> bool:
    """Whether integers, or fractions, are lost. Rounding to fewer bits is no such loss.

    >>> is_narrower(torch.int64, torch.uint8), is_narrower(torch.bool, torch.int64)
    (True, False)
    >>> is_narrower(torch.float32, torch.int64), is_narrower(torch.int64, torch.bfloat16)
    (True, False)
    """
    if found.is_floating_point or found.is_complex:
        return False
    if before.is_floating_point or before.is_complex:
        return True
    return largest(found) < largest(before)


def largest(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


@rule("mul", "multiply")
def product(call: Call) -> Known:
    a, b = call.of("self"), call.of("other")
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Number):
            return scaled(other, one.power)
        if one == FIXED and isinstance(other, Reduced | Root):
            return times_constant(call, other)
    if isinstance(a, Rows) and isinstance(b, Rows):
        return MIXED if a.over and b.over else aligned(call, ["self", "other"])
    if a == Root(2) and call.given["self"] is call.given["other"]:
        return SUM
    for name, one in (("other", a), ("self", b)):
        if one == SUM and (found := inverse_of_total(call, name)) is not None:
            return Reduced((found,))
    return linear(call, a, b)


def inverse_of_total(call: Call, name: str) -> Total | None:
    """`1 / mask.sum()`, by which a sum is multiplied."""
    node, total = call.given[name], total_of(call, name)
    if total is not None and base_name(node) == "mul" and node.args[1:] == (1,):
        (node,) = node.all_input_nodes  # torch writes it so
    if total is None or base_name(node) != "reciprocal":
        return None
    return Total(total, node.all_input_nodes[0])


@rule("div", "divide", "true_divide")
def quotient(call: Call) -> Known:
    a, b = call.of("self"), call.of("other")
    if call.given.get("rounding_mode") is not None:
        return elementwise(call)
    if isinstance(b, Number):
        return scaled(a, -b.power)
    if isinstance(b, Size):
        return over_chosen(call, a, b.mask)
    if b == FIXED:
        return times_constant(call, a) if isinstance(a, Reduced | Root) else linear(call, a, b)
    total, value = total_of(call, "other"), call.given["other"]
    if total is not None and a == SUM:
        return Reduced((over_total(call, total, value),))
    if total is not None and isinstance(a, Rows) and a.over is None and not shape(value):
        return Rows(a.dim, over_total(call, total, value), a.mask)
    if b == MEAN and call.is_own("other") and not shape(value):
        if isinstance(a, Rows) and a.over is None and a.mask is None:
            return Rows(a.dim, Average(value))
        if a == MEAN:
            return Reduced((Average(value),))
    return elementwise(call)


def over_total(call: Call, total: fx.Node, value: Any) -> Total:
    """Multiples of one sum are told by it: labels, and labels times classes.

    The number of rows is no such factor: times a mean over them, it makes a sum.
    """
    factor = 1.0
    if value is not total:
        return Total(total, value)
    while base_name(total) in ("mul", "div") and len(total.all_input_nodes) == 1:
        (source,), other = total.all_input_nodes, total.args[1]
        positive = isinstance(other, int | float) and other > 0 and not total.kwargs
        if not positive or call.known[source] != SUM:
            break
        factor *= other if base_name(total) == "mul" else 1 / other
        total = source
    return Total(total, total, factor)


def over_chosen(call: Call, known: Known, mask: fx.Node) -> Known:
    """Divided by the number of elements that a mask chooses."""
    match known:
        case Reduced(()):
            return Reduced((Chosen(mask, sums_chosen(call.given["self"])),))
        case Rows(dim, None, own):
            return Rows(dim, Chosen(mask, own is not None), own)
    return MIXED


def sums_chosen(total: fx.Node) -> bool:
    """Whether a total is one of chosen elements: their number follows from values."""
    while len(total.all_input_nodes) == 1 and not shape(total.all_input_nodes[0]):
        (total,) = total.all_input_nodes
    sizes = (size for one in total.all_input_nodes for size in shape(one))
    return any(not isinstance(size, int) for size in sizes)


def times_constant(call: Call, known: Reduced | Root) -> Known:
    """A number in the graph may be made from the number of rows, if no twin shows otherwise."""
    other = call.given.get("other")
    if call.twin is not None or not isinstance(other, int | float):
        return known
    factor = RULES[call.name] is product and isinstance(other, int)
    counts = factor and other and call.rows > 1 and other % call.rows == 0
    return MIXED if known == SUM or isinstance(known, Root) or counts else known


def linear(call: Call, a: Known, b: Known) -> Known:
    """Rows that are divided by something stay so when they are scaled."""
    if isinstance(a, Rows) and b == FIXED or isinstance(b, Rows) and a == FIXED:
        return aligned(call, ["self", "other"])
    return elementwise(call)


def is_nothing(call: Call, name: str) -> bool:
    """Whether it is `0 * unused.sum()`, which gives parameters a gradient and changes nothing.

    A twin shows that the 0 is not made from the number of rows.
    """
    nodes = call.given.get(name), call.given_twin.get(name)
    return call.twin is not None and all(isinstance(n, fx.Node) and is_zero(n) for n in nodes)


def adds_nothing(call: Call) -> bool:
    """Whether it is the 0 that a loop starts with, for any number of rows."""
    numbers = call.given.get("other"), call.given_twin.get("other")
    return call.twin is not None and all(isinstance(n, int | float) and n == 0 for n in numbers)


def is_zero(node: fx.Node) -> bool:
    if node.op != "call_function" or base_name(node) != "mul" or shape(node):
        return False
    return any(isinstance(one, int | float) and one == 0 for one in node.args)


@rule("add", "sub", "subtract", "rsub")
def sum_of_two(call: Call) -> Known:
    a, b = call.of("self"), call.of("other")
    if adds_nothing(call):
        return a
    if {a, b} == {SUM, Number(1)}:  # so much for each row: `labels.numel() - ignored.sum()`
        return SUM
    if isinstance(a, Reduced) or isinstance(b, Reduced):
        if isinstance(a, Reduced | Fixed) and is_nothing(call, "other"):
            return a
        if isinstance(b, Reduced | Fixed) and is_nothing(call, "self"):
            return b
        found = plus(a, b)
        return function_of_total(call) if found == MIXED else found
    if isinstance(a, Rows) and isinstance(b, Rows) and a.over == b.over:
        return aligned(call, ["self", "other"])
    return elementwise(call)


# Reductions


def reduced(known: Known, kind: int) -> Known:
    """The mean or sum of everything, or all of it."""
    match known:
        case _ if kind == NONE:
            return known
        case Rows(_, Average() as over, None):
            return Reduced((over,)) if kind == MEANS else MIXED
        case Rows(_, over, mask) if kind == MEANS:
            return MIXED if over is not None else Reduced((Chosen(mask),)) if mask else MEAN
        case Rows(_, over, _):
            return Reduced((over,)) if over is not None else SUM
    return known


@rule("count_nonzero")
def count(call: Call) -> Known:
    """The sum of `x != 0`. Of a sum over rows, it is none over rows."""
    known = call.of("self")
    plain = known == FIXED or (isinstance(known, Rows) and known.over is None)
    return sum_or_mean(call) if plain else MIXED


@rule("sum", "mean")
def sum_or_mean(call: Call) -> Known:
    known, dims = call.of("self"), call.dims()
    if isinstance(known, Rows) and dims is not None and known.dim not in dims:
        return moved(call, known, dims)
    if isinstance(known, RowNumbers | Root) or is_cut_off(value(call.node)):
        return MIXED
    return reduced(known, MEANS if call.name == "mean" else SUMS)


def is_cut_off(found: object) -> bool:
    """Whether a sum may not fit into its type, as in `mask.sum(dtype=torch.uint8)`."""
    return isinstance(found, Tensor) and is_narrower(torch.int32, found.dtype)


def moved(call: Call, known: Rows, dims: list[int]) -> Known:
    """Rows after other dimensions were reduced."""
    kept = len(shape(call.node)) == len(shape(next(iter(call.tensors.values()))))
    dim = known.dim if kept else known.dim - sum(d < known.dim for d in dims)
    return call.checked(Rows(dim, known.over, known.mask))


@rule(
    "softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp", "amax", "amin", "argmax",
    "argmin", "prod", "any", "all", "std", "var", "cumsum", "flip",
    "sort", "argsort", "topk", "max", "min", "median", "cosine_similarity", "diff",
    "glu", "roll", "softmin", "cumprod", "logcumsumexp", "nansum", "nanmean", "var_mean",
)  # fmt: skip
def within_rows(call: Call) -> Known:
    """Works along other dimensions than that of the rows. `torch.max(a, b)` is no reduction."""
    if "other" in call.given:
        return elementwise(call)
    first, dims = call.of(next(iter(call.given))), call.dims(along(call))
    if first == FIXED and all(call.of(name) == FIXED for name in call.given):
        return FIXED
    if not isinstance(first, Rows) or first.over is not None or dims is None or first.dim in dims:
        return MIXED
    others = [call.of(n) for n in list(call.tensors)[1:]]
    return moved(call, first, dims) if all(o in (first, FIXED) for o in others) else MIXED


def along(call: Call) -> str:
    return "dims" if call.name in ("flip", "roll") else "dim"


def works_along_rows(call: Call) -> bool:
    """Such as a softmax over the first dimension: rows meet."""
    if RULES.get(call.name) is not within_rows:
        return False
    first, dims = call.of(next(iter(call.given))), call.dims(along(call))
    return isinstance(first, Rows) and dims is not None and first.dim in dims


def pairs_rows(call: Call) -> bool:
    """Each row beside each other one, as in `q[:, None] == q[None]`."""
    if not is_elementwise(call.node):
        return False
    rows = ((shape(one), call.known[one]) for one in call.node.all_input_nodes)
    return len({len(sizes) - one.dim for sizes, one in rows if isinstance(one, Rows)}) > 1


def is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or base_name(node) in _ALSO


_ALSO = frozenset({
    "masked_fill", "log_sigmoid", "floor_divide", "dropout", "not_equal", "greater", "less",
    "greater_equal", "less_equal", "__and__", "__or__", "__xor__", "absolute", "clip", "fix",
    "isclose", "isfinite", "logit", "square", "softplus", "softshrink", "hardtanh",
})  # fmt: skip
