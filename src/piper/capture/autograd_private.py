"""torch's autograd.Functions and its engine: private names of torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward


def apply_function(function: type, *args: Any) -> Any:
    """`function.apply(*args)`, also inside `functions_as`."""
    return super(_SingleLevelFunction, function).apply(*args)


@contextmanager
def functions_as(apply: Callable[..., Any]) -> Iterator[None]:
    """While this is open, each call of an autograd.Function is `apply(function, *args)`.

    Not on `Function` itself: a model may keep `MyFunction.apply`, which has found it already.
    """
    outer = vars(_SingleLevelFunction).get("apply")
    _SingleLevelFunction.apply = classmethod(apply)
    try:
        yield
    finally:
        if outer is None:
            del _SingleLevelFunction.apply
        else:
            _SingleLevelFunction.apply = outer


def apply_now() -> Callable[..., Any]:
    """What `functions_as` calls at the moment."""
    apply: Callable[..., Any] = vars(_SingleLevelFunction)["apply"].__func__
    return apply


def run_backward(loss: Tensor) -> None:
    """As `loss.backward()`, which is one call for a mode: it would not see what backwards call."""
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip
