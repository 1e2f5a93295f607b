"""A model that is captured on a CPU, with the operators that a GPU would run: for forecasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from piper.capture.fx_nodes import value
from piper.capture.kernels.rms_norm import RMS_NORM, has_kernel
from piper.capture.trace.forward import Traced

aten = torch.ops.aten
_wanted = ContextVar("_wanted", default=False)


@contextmanager
def as_on_gpu(wanted: bool = True) -> Iterator[None]:
    """Inside, `capture` for a CPU has operators whole that a GPU has kernels for.

    The results are those of a CPU up to the order of sums, so nothing is trained like this.
    """
    before = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(before)


def with_gpu_kernels(traced: Traced) -> None:
    """Replace operators that torch takes apart on a CPU, if this is wanted."""
    if not _wanted.get() or torch.device(traced.device).type != "cpu":
        return
    for node in traced.root.graph.find_nodes(op="call_function", target=aten.rms_norm.default):
        x, shape, weight, eps = (*node.args, None, None)[:4]
        if has_kernel(value(x), None if weight is None else value(weight)):
            node.target, node.args = RMS_NORM, (x, shape, weight, eps)
