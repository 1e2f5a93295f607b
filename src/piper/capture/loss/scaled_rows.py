"""Rows that are divided by one number, as in `mask / mask.mean()`, and set to 0 if they are NaN."""

from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from piper.capture.loss.calls import Call, base_name, beside
from piper.capture.loss.domain import FIXED, MIXED, Average, Known, Rows

ZEROS = ("zeros", "zeros_like", "new_zeros")
FULL = ("full", "full_like", "new_full", "scalar_tensor")
COPIES = ("lift_fresh", "lift_fresh_copy", "clone", "to", "_to_copy", "expand", "expand_as")


def scaled_rows(call: Call) -> Known:
    """What an operator makes of them, element by element, if they stay so."""
    if call.name == "isnan" or (call.name == "ne" and call.given["self"] is call.given["other"]):
        known = call.of("self")
        return Rows(known.dim, None, known.mask) if isinstance(known, Rows) else MIXED
    if call.name == "where":
        return partly_zero(call, call.given["condition"], call.given["self"], call.given["other"])
    if call.name == "masked_fill":
        return partly_zero(call, call.given["mask"], call.given["self"], call.given["value"])
    return MIXED


def partly_zero(call: Call, deciding: Any, *parts: Any) -> Known:
    """0 in place of some elements: 0 divided by anything."""
    kept = [one for one in parts if not is_zero(one)]
    by = call.known.get(deciding, FIXED)
    if len(kept) != 1 or not isinstance(call.known.get(kept[0]), Rows):
        return MIXED
    if by != FIXED and not (isinstance(by, Rows) and by.over is None):
        return MIXED
    found = beside(call, [*kept, *([deciding] if by != FIXED else [])])
    own = kept[0] in call.own and asks_for_nan(deciding)
    if own and isinstance(found, Rows) and isinstance(found.over, Average):
        return replace(found, over=replace(found.over, zeroed=True))
    return found


def asks_for_nan(node: fx.Node) -> bool:
    itself = base_name(node) == "ne" and node.args[0] is node.args[1]
    return itself or base_name(node) == "isnan"


def is_zero(one: Any) -> bool:
    """Whether it is 0, or a tensor of zeros."""
    if not isinstance(one, fx.Node):
        return isinstance(one, int | float) and one == 0
    if one.op == "get_attr":
        held: Any = one.graph.owning_module
        for name in str(one.target).split("."):
            held = getattr(held, name, None)
        return isinstance(held, Tensor) and not held.any()
    name = base_name(one)
    if name in COPIES:
        return is_zero(one.args[0])
    filled = [*one.args, *one.kwargs.values()][0 if name == "scalar_tensor" else 1 : 2]
    return name in ZEROS or (name in FULL and filled == [0])
