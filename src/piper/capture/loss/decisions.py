"""Decisions in a loss by what all rows give together, which each microbatch would make alone."""

from collections.abc import Mapping

from torch import fx

from piper.capture.fx_nodes import closure, in_order, line
from piper.capture.loss.calls import base_name, shape
from piper.capture.loss.domain import FIXED, Known, Reduced, Root
from piper.capture.loss.rules import is_elementwise

SMOOTH = frozenset({  # a test on numbers shows what these do to a mean
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "neg",
    "negative", "positive", "reciprocal", "pow", "square", "sqrt", "rsqrt", "exp", "exp2", "expm1",
    "log", "log2", "log10", "log1p", "sin", "cos", "lerp", "addcmul", "addcdiv", "float_power",
    "clone", "contiguous", "detach", "alias", "to", "_to_copy", "type_as", "double", "float",
    "half", "bfloat16", "lift_fresh", "lift_fresh_copy", "copy", "real", "imag", "conj",
})  # fmt: skip
CHOOSE = frozenset({  # of several numbers, or by how large they are
    "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "sort", "argsort", "topk",
    "median", "nanmedian", "kthvalue", "quantile", "nanquantile", "cummax", "cummin", "mode",
    "any", "all", "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "norm",
    "linalg_vector_norm", "linalg_norm", "dist", "pairwise_distance", "cdist", "bucketize",
    "searchsorted", "unique", "histc", "count_nonzero", "prelu", "rrelu", "dropout", "l1_loss",
    "smooth_l1_loss", "huber_loss", "margin_ranking_loss", "hinge_embedding_loss",
    "soft_margin_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "cosine_similarity", "floor_divide", "remainder", "fmod", "isclose",
})  # fmt: skip


COMPARE = frozenset({
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal",
    "not_equal", "any", "all",
})  # fmt: skip


def deciding_line(known: Mapping[fx.Node, Known], loss: fx.Node, own: frozenset[fx.Node]) -> str:
    """The first line that compares a sum or mean over rows, or replaces some of its values.

    Numbers alone do not show it: `(loss - 0.1).abs()` is a mean as long as all losses are larger.
    Sums of the batch's `own` tensors only count rows, and others say what to do with these.
    """
    for node in in_order(loss.graph, closure([loss], stop=())):
        if node.op == "call_function" and decides(node):
            given = (known[one] for one in node.all_input_nodes if one not in own)
            if any(isinstance(one, Reduced | Root) for one in given):
                return line(node) or "a line that is not in your files"
    return ""


def decides(node: fx.Node) -> bool:
    name = base_name(node)
    return name in CHOOSE or (is_elementwise(node) and name not in SMOOTH)


def threshold_line(known: Mapping[fx.Node, Known], loss: fx.Node, own: frozenset[fx.Node]) -> str:
    """The first line that compares how many rows of the batch count, or asks whether any does."""
    for node in in_order(loss.graph, closure([loss], stop=())):
        compares = node in own and node.op == "call_function" and base_name(node) in COMPARE
        counts = not shape(node) and any(known[one] != FIXED for one in node.all_input_nodes)
        if compares and counts:
            return line(node) or "a line that is not in your files"
    return ""
