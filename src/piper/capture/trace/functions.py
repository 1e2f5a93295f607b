"""What a trace would lose: checkpoints, autograd.Functions, the counters of batch norms."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from torch.autograd import Function
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointFunction

from piper.capture import torch_private
from piper.capture.autograd_private import apply_function, apply_now, functions_as
from piper.capture.source_lines import is_another_thread
from piper.capture.trace.batch_norm import counted_in_tensors
from piper.capture.trace.custom_functions import called

RECOMPUTE = "piper_recompute"  # the key of a checkpoint's number in a node's meta["custom"]


@contextmanager
def entered(
    around_backward: Callable[[Sequence[Any]], AbstractContextManager[None]],
) -> Iterator[set[type]]:
    """Inside `intercepted`, the user's autograd.Functions run as they are. Gives those that ran.

    `around_backward` gets the gradients that a backward is given.
    """
    ran, whole = set[type](), apply_now()

    def apply(cls: Any, *args: Any) -> Any:
        torchs = cls is CheckpointFunction or is_of_torch(cls)
        if torchs or cls.backward is Function.backward or is_another_thread():
            return whole(cls, *args)

        def backward(*given: Any) -> Any:
            with around_backward(given[1:]):
                return cls.backward(*given)

        ran.add(cls)
        watched = type(cls.__name__, (cls,), {"backward": staticmethod(backward)})
        return apply_function(watched, *args)

    with functions_as(apply):
        yield ran


def is_of_torch(function: type) -> bool:
    return function.__module__.split(".")[0] == "torch"


@contextmanager
def intercepted() -> Iterator[None]:
    """Mark what runs inside torch.utils.checkpoint. The user's autograd.Functions stay whole."""
    numbers = count()

    @contextmanager
    def mark() -> Iterator[None]:
        with traceback.annotate({RECOMPUTE: next(numbers)}):
            yield

    def apply(cls: type, *args: Any) -> Any:
        if is_another_thread():
            return apply_function(cls, *args)
        if cls is CheckpointFunction:
            run, _, *rest = args
            with mark():
                return run(*rest)
        if is_of_torch(cls):
            return apply_function(cls, *args)
        return called(cls, args)

    replaced = functions_as(apply)
    with replaced, torch_private.checkpoints_as(mark), counted_in_tensors():
        yield
