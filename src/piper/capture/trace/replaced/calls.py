"""Functions of torch that a trace replaces by others that compute the same, or refuses."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piper.capture import refusals
from piper.capture.source_lines import current_line
from piper.capture.torch_private import has_values, is_real, outside_of_traces
from piper.capture.trace.replaced.caught_errors import refuse_caught
from piper.capture.trace.replaced.diagonals import fill_diagonal
from piper.capture.trace.replaced.equal_masks import EqualMasks
from piper.capture.trace.replaced.losses import ctc, gaussian
from piper.capture.trace.replaced.normal_numbers import normal
from piper.capture.trace.replaced.numbers import formatted
from piper.capture.trace.replaced.recurrent import lstm, recurrent
from piper.capture.trace.replaced.statistics import (
    choices,
    correlation,
    covariance,
    least_squares,
)
from piper.capture.trace.replaced.unknown_sizes import UNKNOWN_SIZES


class ReplacedCalls(torch.overrides.TorchFunctionMode):
    """Recurrent layers one by one, the CTC loss with lengths as tensors, equal masks as one."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.functions = {**(REPLACED if functions is None else functions), **EqualMasks().calls}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_caught(name := getattr(func, "__name__", ""), args)
        other = self.functions.get(name)
        found = other(func, *args, **(kwargs or {})) if other else NotImplemented
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


def packed(func: Any, *args: Any) -> Any:
    raise refusals.packed(current_line())


def as_python(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Lists and arrays of a tensor that has no values: torch raises errors of its own."""
    try:
        return func(tensor, *args, **kwargs)
    except (RuntimeError, TypeError) as error:
        if is_real(tensor):
            raise
        raise refusals.value_wanted(current_line()) from error


def as_array(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In a trace, torch would make the array of a copy without values: of whatever is in memory."""
    if not has_values(tensor):
        return as_python(func, tensor, *args, **kwargs)
    with outside_of_traces():
        return func(tensor, *args, **kwargs)


def without_chunks(func: Any, *args: Any, options: Any = None, **kwargs: Any) -> Any:
    """In chunks, torch computes the gradient in the forward, where a trace does not see it."""
    return NotImplemented if options is None else func(*args, **kwargs)


def bincount(func: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """With so many bins as the user expects, or an error when it runs: other sizes are values."""
    if not minlength:
        return NotImplemented
    exact = weights is None or weights.dtype is torch.float32
    kind = torch.int64 if weights is None else torch.float32 if exact else torch.float64
    added = torch.ones_like(input, dtype=kind) if weights is None else weights.detach().to(kind)
    return input.new_zeros(minlength, dtype=kind).scatter_add(0, input.long(), added)


IN_PROOFS: dict[str, Callable[..., Any]] = {  # rules know the rest
    **UNKNOWN_SIZES,
    "gaussian_nll_loss": gaussian,
    "ctc_loss": ctc,
    "__format__": formatted,
    "bincount": bincount,
    "cov": covariance,
    "corrcoef": correlation,
    "combinations": choices,
    "linalg_lstsq": least_squares,
    "normal": normal,
    "fill_diagonal_": fill_diagonal,
}
REPLACED: dict[str, Callable[..., Any]] = {
    **IN_PROOFS,
    "lstm": lstm,
    "gru": recurrent,
    "rnn_tanh": recurrent,
    "rnn_relu": recurrent,
    "linear_cross_entropy": without_chunks,
    "_pack_padded_sequence": packed,
    "tolist": as_python,
    "numpy": as_array,
    "__array__": as_array,
}
