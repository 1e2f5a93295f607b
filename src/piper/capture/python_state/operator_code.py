"""The user's code behind operators: torch keeps it, and a search by names does not find it."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from piper.capture.python_state.places import Root
from piper.capture.source_lines import is_users
from piper.capture.tracing_private import registered_backwards

_TORCH = os.path.dirname(torch.__file__)
_FILES = ("_ops.py", "library.py", "_library", "autograd/function.py")  # these call kernels
_CALLERS = tuple(os.path.join(_TORCH, one) for one in _FILES)

_RAN: dict[CodeType, FunctionType] = {}  # functions that ran while a derivative was made


def code_of_operators(ran: bool = True) -> Iterator[Root]:
    """Backwards and kernels that run only when a graph is made.

    Those of torch.library.custom_op run, and so read, in each step. `ran`: also those that are
    found by running them, which only the process that makes derivatives does.
    """
    for name, held in registered_backwards():
        for key in ("_backward_fn", "_setup_context_fn"):
            if isinstance(held.get(key), FunctionType):
                yield Root(held, key, f"the backward of {name}", ())
    for one in _RAN.values() if ran else ():
        yield Root({"code": one}, "code", one.__qualname__, ())


@contextmanager
def found_by_running() -> Iterator[list[FunctionType]]:
    """Functions of the user that run inside, and were not known. Filled at the end.

    torch does not tell which kernels `Library.impl` has registered.
    """
    new: list[FunctionType] = []
    calls: dict[CodeType, FunctionType] = {}
    with torch.autograd.set_multithreading_enabled(False), _calls_seen(calls):
        yield new
    found = {code: one for code, one in calls.items() if code not in _RAN}
    for one in gc.get_referrers(*found) if found else ():
        if isinstance(one, FunctionType) and one.__code__ in found:
            found[one.__code__] = one
    _RAN.update(found)
    new += found.values()


@contextmanager
def _calls_seen(calls: dict[CodeType, FunctionType]) -> Iterator[None]:
    before: Any = sys.getprofile()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and _is_kernel(frame):
            calls[frame.f_code] = _function(frame)
        if before is not None:
            before(frame, event, argument)

    if before is not None and not callable(before):  # a profiler in C cannot be put back
        yield
        return
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_kernel(frame: FrameType) -> bool:
    caller = frame.f_back
    by_torch = caller is not None and caller.f_code.co_filename.startswith(_CALLERS)
    return by_torch and is_users(frame.f_code.co_filename)


def _function(frame: FrameType) -> FunctionType:
    """One like that which runs. It is used where Python does not tell: after `gc.freeze`."""
    cells = tuple(CellType(frame.f_locals.get(name)) for name in frame.f_code.co_freevars)
    return FunctionType(frame.f_code, frame.f_globals, closure=cells)
