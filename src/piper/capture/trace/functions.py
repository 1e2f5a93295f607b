"""Python functions whose meaning a trace would lose: checkpoints and autograd.Functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointFunction

from piper.capture import torch_private
from piper.capture.trace import refusals

RECOMPUTE = "piper_recompute"  # the key of a checkpoint's number in a node's meta["custom"]


@contextmanager
def intercepted() -> Iterator[None]:
    """Mark what runs inside torch.utils.checkpoint. The user's autograd.Functions are an error.

    A trace sees only their forward, and would silently differentiate that.
    """
    function = torch.autograd.Function
    original = function.__dict__["apply"]
    numbers = count()

    @contextmanager
    def mark() -> Iterator[None]:
        with traceback.annotate({RECOMPUTE: next(numbers)}):
            yield

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *rest = args
            with mark():
                return run(*rest)
        if cls.__module__.split(".")[0] == "torch":
            return original.__func__(cls, *args, **kwargs)
        raise refusals.custom_function(cls.__name__)

    function.apply = classmethod(apply)
    try:
        with torch_private.checkpoints_as(mark):
            yield
    finally:
        function.apply = original
