"""What writes to a part of a tensor do to rows: `labels[labels == pad] = -100`, `x[:, 0] = 0`."""

import torch
from torch import fx

from piper.capture.fx_nodes import value
from piper.capture.loss.calls import Call, shape
from piper.capture.loss.domain import FIXED, MIXED, Fixed, Known, RowNumbers, Rows
from piper.capture.loss.rules import elementwise, rule
from piper.capture.loss.scaled_rows import partly_zero
from piper.capture.loss.shapes import by_numbers


@rule("select_scatter", "slice_scatter")
def part_written(call: Call) -> Known:
    """Of every row, the same part."""
    (dim,) = call.dims() or [0]
    target, source = call.of("self"), call.of("src")
    gone = call.name == "select_scatter"
    if isinstance(source, Rows):
        source = Rows(source.dim + (gone and dim <= source.dim), source.over, source.mask)
    found = together(target, source)
    return call.checked(found) if isinstance(found, Rows) and found.dim != dim else fixed(found)


@rule("copy")
def copied(call: Call) -> Known:
    """Into all of a tensor, whose values are lost."""
    if shape(call.given["src"]) == shape(call.node):
        return call.of("src")
    return elementwise(call) if MIXED not in (call.of("self"), call.of("src")) else MIXED


@rule("index_put")
def put(call: Call) -> Known:
    """One number where a mask is true, or at the same places of every row, or at one of each."""
    target, indices = call.of("self"), call.given["indices"]
    if call.given.get("accumulate") or not is_one_number(call):
        return MIXED
    if len(indices) == 1 and value(indices[0]).dtype is torch.bool:
        if isinstance(target, Rows) and target.over is not None:
            return partly_zero(call, indices[0], call.given["self"], call.given["values"])
        found = together(target, call.known[indices[0]])
        inside = isinstance(found, Rows) and found.dim < len(shape(indices[0]))
        alone = call.known[indices[0]] == FIXED and inside
        return MIXED if alone else call.checked(found) if isinstance(found, Rows) else fixed(found)
    return at_places(call, target, indices)


def at_places(call: Call, target: Known, indices: list[fx.Node | None]) -> Known:
    known = [FIXED if one is None else call.known[one] for one in indices]
    first = known[0]
    if isinstance(first, RowNumbers) and first.mask is None:
        each = target == Rows(0) and shape(call.given["self"])[0] == call.rows
        own = all(one == FIXED or one == Rows(0) for one in known[1:])
        return call.checked(Rows(0)) if each and own else MIXED
    if isinstance(first, RowNumbers) and first.mask is not None:  # all that `torch.where` names
        masked = by_numbers(call, target, indices, first.mask) != MIXED
        return call.checked(Rows(0)) if masked else MIXED
    if not isinstance(target, Rows) or any(one != FIXED for one in known):
        return fixed(target) if all(one == FIXED for one in known) else MIXED
    places = [dim for dim, one in enumerate(indices) if one is not None]
    return call.checked(target) if target.dim not in places and target == plain(target) else MIXED


def is_one_number(call: Call) -> bool:
    return call.of("values") == FIXED and value(call.given["values"]).numel() == 1


def together(target: Known, other: Known) -> Known:
    """Two tensors whose rows are in the same dimension, or one that has rows."""
    rows = {one for one in (target, other) if isinstance(one, Rows)}
    if any(not isinstance(one, Rows | Fixed) for one in (target, other)) or len(rows) > 1:
        return MIXED
    found = rows.pop() if rows else FIXED
    return found if not isinstance(found, Rows) or found == plain(found) else MIXED


def plain(known: Rows) -> Rows:
    return Rows(known.dim)


def fixed(known: Known) -> Known:
    return FIXED if known == FIXED else MIXED
