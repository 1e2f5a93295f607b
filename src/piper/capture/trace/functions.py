"""Python functions that a trace would see through: what they mean has to be caught on the way."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointFunction

from piper.capture import torch_private
from piper.capture.trace import refusals

RECOMPUTE = "piper_recompute"  # where a node's meta["custom"] has the number of its checkpoint


@contextmanager
def intercepted() -> Iterator[None]:
    """Remember what is inside torch.utils.checkpoint, and refuse the user's autograd.Functions.

    Of those a trace sees the forward only, and would quietly use the derivative of that.
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
