"""Decisions in a loss by what all rows give together, which each microbatch would make alone."""

from collections.abc import Mapping

from torch import fx

from piper.capture.fx_nodes import closure, in_order, line
from piper.capture.loss.calls import base_name, shape
from piper.capture.loss.domain import FIXED, Known, Reduced, Root

DECIDE = frozenset({
    "nan_to_num", "isnan", "isfinite", "isinf", "isposinf", "isneginf", "clamp", "clamp_min",
    "clamp_max", "clip", "minimum", "maximum", "fmin", "fmax", "relu", "gt", "ge", "lt", "le",
    "eq", "ne", "greater", "greater_equal", "less", "less_equal", "not_equal", "heaviside", "sign",
})  # fmt: skip


COMPARE = frozenset({
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal",
    "not_equal", "any", "all",
})  # fmt: skip


def deciding_line(known: Mapping[fx.Node, Known], loss: fx.Node, own: frozenset[fx.Node]) -> str:
    """The first line that compares a sum or mean over rows, or replaces some of its values.

    Sums of the batch's `own` tensors only count rows, and others say what to do with these.
    """
    for node in in_order(loss.graph, closure([loss], stop=())):
        if node.op == "call_function" and base_name(node) in DECIDE:
            given = (known[one] for one in node.all_input_nodes if one not in own)
            if any(isinstance(one, Reduced | Root) for one in given):
                return line(node) or "a line that is not in your files"
    return ""


def threshold_line(known: Mapping[fx.Node, Known], loss: fx.Node, own: frozenset[fx.Node]) -> str:
    """The first line that compares how many rows of the batch count, or asks whether any does."""
    for node in in_order(loss.graph, closure([loss], stop=())):
        compares = node in own and node.op == "call_function" and base_name(node) in COMPARE
        counts = not shape(node) and any(known[one] != FIXED for one in node.all_input_nodes)
        if compares and counts:
            return line(node) or "a line that is not in your files"
    return ""
