"""Gradients that are sums over rows, in the user's own backwards.

Those of microbatches add up to that of the batch only if they are changed linearly: half of a
gradient has half its norm, but the same sign.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from piper.capture.trace.row_calls.both_calls import Both, is_integer

NOT_LINEAR = frozenset({
    "clamp", "clip", "clamp_min", "clamp_max", "sign", "sgn", "round", "floor", "ceil", "trunc",
    "frac", "tanh", "sigmoid", "relu", "abs", "absolute", "sqrt", "rsqrt", "pow", "square", "exp",
    "log", "norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "normalize",
    "maximum", "minimum", "softmax", "log_softmax", "sort", "topk", "median", "max", "min", "amax",
    "amin", "std", "var", "hardtanh", "softsign", "quantile", "gt", "lt", "ge", "le", "reciprocal",
})  # fmt: skip
PRODUCTS = frozenset({"mul", "rmul", "imul", "matmul", "mm", "bmm", "einsum", "linear", "dot"})
QUOTIENTS = frozenset({"div", "truediv", "itruediv", "rtruediv", "divide"})
SUMS = frozenset({"add", "radd", "iadd", "sub", "rsub", "isub"})


def is_changed(both: Both, known: Sequence[Any], sums: Collection[Any]) -> bool:
    """Whether a call does not change such a sum linearly. `sums`: kinds that are sums over rows."""
    name, inputs = both.all.name, list(both.inputs)
    described = [one for _, one in both.all.inputs]
    pairs = zip(known, inputs, described, strict=True)
    each = [kind in sums and not rows and not is_integer(one) for kind, (_, rows), one in pairs]
    if not both.all.backward or not any(each):
        return False
    if name in SUMS:  # what is added once in each microbatch is added too often
        others = any(not one and not rows for one, (_, rows) in zip(each, inputs, strict=True))
        return others or (len(each) == 1 and any(both.all.numbers))
    divides = name in QUOTIENTS and (any(each[1:]) or len(each) == 1 and name == "rtruediv")
    return name in NOT_LINEAR or divides or (name in PRODUCTS and sum(each) > 1)
