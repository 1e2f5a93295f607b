"""Functions of torch that ask for a size which depends on data, as that of `x[mask]` does.

The same numbers and derivatives from functions that do not ask.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

FAR = 40.0  # from here on, log(1 + exp(x)) is x in float64


def is_unknown(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and any(not isinstance(size, int) for size in tensor.shape)


def log_sum_exp(func: Any, input: Tensor, dim: Any, keepdim: bool = False, **rest: Any) -> Any:
    if rest or not is_unknown(input) or not input.is_floating_point():
        return NotImplemented
    most = input.detach().amax(dim, keepdim=True)
    most = most.masked_fill(most.isinf(), 0.0)
    found = (input - most).exp().sum(dim, keepdim=True).log() + most
    return found if keepdim else found.squeeze(dim)


def log_sigmoid(func: Any, input: Tensor) -> Any:
    return -F.softplus(-input, threshold=FAR) if is_unknown(input) else NotImplemented


def cross_entropy(
    func: Any, input: Tensor, target: Tensor, weight: Tensor | None = None,
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Of probabilities of classes: that of labels asks for nothing."""
    plain = size_average is reduce is weight is None and input.dim() == 2 and not label_smoothing
    if not plain or not is_unknown(input) or not target.is_floating_point():
        return NotImplemented
    each = -(input.log_softmax(1) * target).sum(1)
    return {"mean": each.mean, "sum": each.sum, "none": lambda: each}[reduction]()


UNKNOWN_SIZES: dict[str, Callable[..., Any]] = {
    "logsumexp": log_sum_exp,
    "special_logsumexp": log_sum_exp,
    "log_sigmoid": log_sigmoid,
    "logsigmoid": log_sigmoid,
    "cross_entropy": cross_entropy,
}
