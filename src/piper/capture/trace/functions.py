"""What a trace would lose: checkpoints, autograd.Functions, the counters of batch norms."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch.fx import traceback
from torch.utils.checkpoint import CheckpointFunction

from piper.capture import torch_private
from piper.capture.trace.batch_norm import counted_in_tensors
from piper.capture.trace.custom_functions import called

RECOMPUTE = "piper_recompute"  # the key of a checkpoint's number in a node's meta["custom"]


@contextmanager
def intercepted() -> Iterator[None]:
    """Mark what runs inside torch.utils.checkpoint. The user's autograd.Functions stay whole."""
    numbers = count()

    @contextmanager
    def mark() -> Iterator[None]:
        with traceback.annotate({RECOMPUTE: next(numbers)}):
            yield

    def apply(cls: type, *args: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *rest = args
            with mark():
                return run(*rest)
        if cls.__module__.split(".")[0] == "torch":
            return torch_private.apply_function(cls, *args)
        return called(cls, args)

    replaced = torch_private.functions_as(apply)
    with replaced, torch_private.checkpoints_as(mark), counted_in_tensors():
        yield
