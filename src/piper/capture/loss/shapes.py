"""What views, lookups and products do to rows."""

import operator

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.loss.calls import Call, beside, shape
from piper.capture.loss.domain import (
    FIXED,
    MIXED,
    SUM,
    Fixed,
    Known,
    Reduced,
    Row,
    RowNumbers,
    Rows,
    Size,
    plus,
)
from piper.capture.loss.rules import elementwise, rule


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
def another_shape(call: Call) -> Known:
    known = call.of("self")
    if isinstance(known, RowNumbers):
        return still_numbers(call, known)
    return call.viewed(known) if isinstance(known, Rows) else known


@rule("squeeze", "unsqueeze", "transpose", "permute", "t", "swapaxes", "movedim", "numpy_T", "mT")
def moved_dimensions(call: Call) -> Known:
    """Which dimension of the result runs over rows is seen on a small tensor."""
    known = call.of("self")
    if isinstance(known, RowNumbers):
        return still_numbers(call, known)
    if not isinstance(known, Rows):
        return known
    before = shape(call.given["self"])
    others = (size for dim, size in enumerate(before) if dim != known.dim)
    if any(not isinstance(size, int) for size in others):
        return MIXED
    with torch.no_grad():  # a size of 3 marks the rows, and 1 or 2 anything else
        sizes = [3 if d == known.dim else 1 if size == 1 else 2 for d, size in enumerate(before)]
        result = call.node.target(torch.empty(sizes), *call.node.args[1:], **call.node.kwargs)
    return call.checked(Rows(list(result.shape).index(3), known.over, known.mask))


@rule("expand", "expand_as", "broadcast_to")
def expanded(call: Call) -> Known:
    known = call.of("self")
    if isinstance(known, Rows):
        more = len(shape(call.node)) - len(shape(call.given["self"]))
        return call.checked(Rows(known.dim + more, known.over, known.mask))
    return filled(call) if known == FIXED else MIXED


@rule("broadcast_tensors")
def broadcast(call: Call) -> Known:
    nodes = call.given["tensors"]
    return FIXED if all(call.known[node] == FIXED for node in nodes) else beside(call, nodes)


@rule("slice", "select", "narrow", "unfold", "split", "split_with_sizes", "chunk", "unbind")
def part(call: Call) -> Known:
    known, dims = call.of("self"), call.dims() or [0]
    if isinstance(known, RowNumbers):
        return MIXED if 0 in dims else still_numbers(call, known)
    if not isinstance(known, Rows):
        return known
    if known.dim in dims and takes_all(call):
        return known
    if known.dim in dims:
        return one_row(call, known)
    gone = call.name in ("select", "unbind") and dims[0] < known.dim
    return call.checked(Rows(known.dim - gone, known.over, known.mask))


def takes_all(call: Call) -> bool:
    """Whether a slice has all rows, of any number: `x[:4]` of four rows has not."""
    if call.name != "slice" or call.given.get("step", 1) != 1:
        return False
    pairs = [(call.node, call.given["self"])]
    pairs += [(call.twin, call.given_twin["self"])] if call.twin is not None else []
    return all(shape(made) == shape(given) for made, given in pairs)


def one_row(call: Call, known: Rows) -> Known:
    """As a loop over rows reads them."""
    alone = shape(call.given["self"])[known.dim] == call.rows and known == Rows(known.dim)
    if not alone or call.name not in ("select", "unbind"):
        return MIXED
    return Row(None) if call.name == "unbind" else Row(call.given["index"] % call.rows)


@rule("pad", "constant_pad_nd")
def padded(call: Call) -> Known:
    known = call.of("self")
    if not isinstance(known, Rows):
        return known if known == FIXED else MIXED
    touched = len(call.given["pad"]) // 2  # dimensions, from the last
    return call.checked(known) if len(shape(call.node)) - known.dim > touched else MIXED


@rule("cat", "stack", "concat", "hstack", "concatenate")
def joined(call: Call) -> Known:
    parts = [call.known[node] for node in call.given["tensors"]]
    if any(isinstance(one, Reduced) for one in parts):
        found = parts[0]
        for one in parts[1:]:
            found = plus(found, one)
        return found
    if all(one == FIXED for one in parts):
        return FIXED
    first, dim = parts[0], call.given.get("dim", 0) % max(1, len(shape(call.node)))
    if parts == [Row(place) for place in range(call.rows)]:
        return MIXED if call.name == "hstack" else call.checked(Rows(dim))
    if not isinstance(first, Rows) or any(one != first for one in parts):
        return MIXED
    if call.name == "stack":
        return call.checked(Rows(first.dim + (dim <= first.dim), first.over, first.mask))
    return MIXED if dim == first.dim else call.checked(first)


@rule("pad_sequence")
def padded_together(call: Call) -> Known:
    """Of each row, or of tensors that have rows behind the dimension that is padded."""
    parts = [call.known[node] for node in call.given["sequences"]]
    first, in_front = parts[0], not call.given.get("batch_first", False)
    if parts == [Row(place) for place in range(call.rows)]:
        return call.checked(Rows(int(in_front)))
    behind = isinstance(first, Rows) and first == Rows(first.dim) and first.dim > 0
    same = behind and all(one == first for one in parts)
    return call.checked(Rows(first.dim + 1)) if isinstance(first, Rows) and same else MIXED


@rule(
    "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like",
    "full_like", "scalar_tensor", "fill", "empty", "empty_like", "new_empty",
)  # fmt: skip
def filled(call: Call) -> Known:
    """The same number everywhere: it may stand beside rows."""
    numbers = {call.of(name) for name in ("fill_value", "s", "value")} - {FIXED}
    if numbers:
        return numbers.pop() if shape(call.node) == () else MIXED
    if call.twin is None:
        return next((k for n in call.tensors if isinstance(k := call.of(n), Rows)), FIXED)
    pairs = list(zip(shape(call.node), shape(call.twin), strict=True))
    grows = [dim for dim, (here, there) in enumerate(pairs) if there == 2 * here and here]
    return FIXED if all(a == b for a, b in pairs) else Rows(grows[0]) if len(grows) == 1 else MIXED


@rule("arange")
def numbers(call: Call) -> Known:
    if call.twin is None or shape(call.node) == shape(call.twin):
        return FIXED
    counts = call.given.get("start", 0) == 0 and call.given.get("step", 1) == 1
    return RowNumbers() if counts and shape(call.node) == (call.rows,) else MIXED


@rule("nonzero", "nonzero_numpy", "argwhere")
def chosen_numbers(call: Call) -> Known:
    mask = call.given["self"]
    if call.of("self") == FIXED:
        return FIXED
    return RowNumbers(mask) if call.of("self") == Rows(0) and is_own_mask(call, mask) else MIXED


@rule("where")
def where(call: Call) -> Known:
    """With one argument, it is `nonzero`."""
    if len(call.given) > 1:
        a, b = call.of("self"), call.of("other")
        alike = call.of("condition") == FIXED and (isinstance(a, Reduced) or isinstance(b, Reduced))
        return plus(a, b) if alike else elementwise(call)
    mask = call.given["condition"]
    found = call.of("condition")
    return RowNumbers(mask) if found == Rows(0) and is_own_mask(call, mask) else MIXED


def still_numbers(call: Call, known: RowNumbers) -> Known:
    """Those that a mask chooses have one column, and stay rows of it or lose it."""
    if known.mask is None:
        return known
    return known if len(shape(known.mask)) == 1 and len(shape(call.node)) == 1 else MIXED


@rule("sym_size", "sym_numel")
def size(call: Call) -> Known:
    known, dims = call.of("self"), call.dims()
    if isinstance(known, Rows | RowNumbers) and known.mask is not None:
        rows = known.dim if isinstance(known, Rows) else 0
        return Size(known.mask) if dims is None or rows in dims else MIXED
    return FIXED if known == FIXED else MIXED


# Lookups and products


@rule("index")
def indexed(call: Call) -> Known:
    source, indices = call.of("self"), call.given["indices"]
    known = [FIXED if one is None else call.known[one] for one in indices]
    if source == FIXED and len(indices) == 1:
        return known[0] if isinstance(known[0], Rows) else FIXED if known[0] == FIXED else MIXED
    first = known[0]
    if isinstance(first, RowNumbers) and first.mask is not None:
        return by_numbers(call, source, indices, first.mask)
    if isinstance(source, Rows) and isinstance(first, RowNumbers) and source.dim == 0:
        rest = all(one == FIXED or one == Rows(0) for one in known[1:])
        alone = source == Rows(0) and shape(call.given["self"])[0] == call.rows
        return call.checked(Rows(0)) if rest and alone else MIXED
    if source == first == Rows(0) and len(indices) == 1:
        return chosen(call, indices[0])
    return MIXED


def by_numbers(call: Call, source: Known, indices: list[fx.Node | None], mask: fx.Node) -> Known:
    """All numbers of a mask, in their order: the elements that it chooses."""
    several = len(shape(mask))
    if source != Rows(0) or len(indices) != several:
        return MIXED
    if several > 1 and not all(map(is_part, indices, range(several))):
        return MIXED
    makers = {one.args[0] if several > 1 else one for one in indices if one is not None}
    return Rows(0, None, mask) if len(makers) == 1 else MIXED


def is_part(node: fx.Node | None, place: int) -> bool:
    """Whether it is this part of what another node returns."""
    return node is not None and node.target is operator.getitem and node.args[1] == place


@rule("masked_select")
def selected(call: Call) -> Known:
    same_shape = shape(call.given["self"]) == shape(call.given["mask"])
    both = call.of("self") == call.of("mask") == Rows(0)
    return chosen(call, call.given["mask"]) if both and same_shape else MIXED


def chosen(call: Call, mask: fx.Node) -> Known:
    return Rows(0, None, mask) if is_own_mask(call, mask) else MIXED


def is_own_mask(call: Call, mask: fx.Node) -> bool:
    return value(mask).dtype is torch.bool and mask in call.own


@rule("gather", "take_along_dim", "scatter", "scatter_add")
def along_dimension(call: Call) -> Known:
    """Picks elements of the same row."""
    dims = call.dims() or [0]
    known = {call.of(name) for name in call.tensors} - {FIXED}
    if len(known) != 1:
        return MIXED if known else FIXED
    (found,) = known
    fits = isinstance(found, Rows) and found.over is None and found.dim not in dims
    return call.checked(found) if fits else MIXED


INDEX = {
    "embedding": "indices", "one_hot": "self", "index_select": "index", "take": "index",
    "bucketize": "self", "searchsorted": "self", "isin": "elements",
}  # fmt: skip


@rule(*INDEX)
def lookup(call: Call) -> Known:
    """Each index is replaced by what it stands for."""
    name = INDEX[call.name]
    if name not in call.tensors:
        return MIXED
    index, tables = call.of(name), [call.of(other) for other in call.tensors if other != name]
    along = call.dims() if call.name == "index_select" else [0]
    if isinstance(index, RowNumbers) and index.mask is not None and along == [0]:
        return by_numbers(call, tables[0], [call.given[name]], index.mask)
    if any(table != FIXED for table in tables) or along != [0]:
        return MIXED
    return index if index == FIXED or (isinstance(index, Rows) and index.over is None) else MIXED


@rule("linear", "mm", "matmul", "mv", "addmm", "layer_norm", "rms_norm")
def from_the_left(call: Call) -> Known:
    """Works on the last dimension of rows, with constants."""
    rows = {name: known for name in call.tensors if isinstance(known := call.of(name), Rows)}
    if any(not isinstance(call.of(name), Rows | Fixed) for name in call.tensors):
        return MIXED
    if not rows:
        return FIXED
    if sums_over_rows(call):
        return SUM
    name, known = next(iter(rows.items()))
    if len(rows) > 1 or name not in ("input", "self", "mat1") or known.over is not None:
        return MIXED
    worked = len(call.given.get("normalized_shape", [0]))
    return call.checked(known) if known.dim < len(shape(call.given[name])) - worked else MIXED


@rule("piper.grouped_mm")
def by_experts(call: Call) -> Known:
    """Each row times the matrix of its expert. The counts say only where those of one begin."""
    return call.of("rows") if call.of("weight") == FIXED else MIXED


def sums_over_rows(call: Call) -> bool:
    """A product of matrices that adds up over the rows of both, as in `x.T @ x`."""
    if call.name not in ("mm", "matmul", "bmm", "dot", "vdot") or len(call.tensors) != 2:
        return False
    (left, a), (right, b) = ((len(shape(one)), call.known[one]) for one in call.tensors.values())
    return a == Rows(left - 1) and b == Rows(max(right - 2, 0))


@rule("dot", "vdot")
def inner(call: Call) -> Known:
    if all(call.of(name) == FIXED for name in call.tensors):
        return FIXED
    return SUM if sums_over_rows(call) else MIXED


@rule("bmm", "baddbmm")
def batched(call: Call) -> Known:
    if sums_over_rows(call):
        return SUM
    return Rows(0) if {call.of(name) for name in call.tensors} == {Rows(0)} else MIXED


@rule("einsum")
def einstein(call: Call) -> Known:
    """Rows have one letter. If the result does not have it, it is a sum over rows."""
    sides, nodes = call.given["equation"].replace(" ", "").split("->"), call.given["tensors"]
    known = [call.known[node] for node in nodes]
    if all(one == FIXED for one in known):
        return FIXED
    terms = sides[0].split(",")
    plain = all(one == FIXED or (isinstance(one, Rows) and one == Rows(one.dim)) for one in known)
    if len(sides) != 2 or "." in sides[0] or not plain:
        return MIXED
    pairs = list(zip(terms, known, strict=True))
    letters = {term[one.dim] for term, one in pairs if isinstance(one, Rows)}
    fixed = {letter for term, one in pairs if one == FIXED for letter in term}
    repeated = any(term.count(letter) > 1 for term in terms for letter in letters)
    if len(letters) != 1 or letters & fixed or repeated:
        return MIXED
    (letter,) = letters
    return call.checked(Rows(sides[1].index(letter))) if letter in sides[1] else SUM
