"""Contexts that leave no node in a trace, though they change what a model computes: refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

from piper.capture import autograd_refusals
from piper.capture.source_lines import current_line
from piper.capture.torch_private import TorchDispatchMode
from piper.capture.trace.side_effects import is_torchs_own
from piper.errors import CaptureError


@contextmanager
def refusing_hidden_contexts() -> Iterator[None]:
    with (
        _refused(torch.inference_mode, lambda _, at: autograd_refusals.inference_mode(at)),
        _refused(graph.saved_tensors_hooks, _saved_tensors),
        _refused(TorchDispatchMode, _dispatch_mode),
    ):
        yield


def _saved_tensors(hooks: Any, where: str) -> CaptureError | None:
    if isinstance(hooks, graph.save_on_cpu):  # the same numbers
        return None
    return autograd_refusals.saved_tensors(where)


def _dispatch_mode(mode: Any, where: str) -> CaptureError | None:
    """Modes of torch count and check; those of users may change results."""
    if type(mode).__module__.partition(".")[0] in ("torch", "piper"):
        return None
    return autograd_refusals.dispatch_mode(where, type(mode).__name__)


@contextmanager
def _refused(
    context: type[Any], refusal: Callable[[Any, str], CaptureError | None]
) -> Iterator[None]:
    """While this is open, the user's code cannot enter such a context; torch's own can."""
    original = context.__enter__

    def enter(self: Any) -> Any:
        by_torch = is_torchs_own(sys._getframe(1).f_code.co_filename)  # as in every operator
        where = "" if by_torch else current_line()
        error = refusal(self, where) if where else None
        if error is not None:
            raise error
        return original(self)

    context.__enter__ = enter
    try:
        yield
    finally:
        context.__enter__ = original
