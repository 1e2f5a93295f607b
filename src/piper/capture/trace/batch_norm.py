"""Batch norms as a trace needs them.

With `momentum=None`, running statistics are plain means over all batches. torch divides by a
counter, as a Python number. Here the counter stays a tensor.

SyncBatchNorm is traced as a batch norm: for one replica, it is one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_NORM: Any = next(kind for kind in nn.BatchNorm1d.__mro__ if "forward" in vars(kind))


@contextmanager
def counted_in_tensors() -> Iterator[None]:
    """While this is open, batch norms need no value of their counter, and no other process."""
    original, synchronised = _NORM.forward, nn.SyncBatchNorm.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        counts = self.momentum is None and self.training and self.track_running_stats
        return _averaged(self, x) if counts else original(self, x)

    _NORM.forward = nn.SyncBatchNorm.forward = forward
    try:
        yield
    finally:
        _NORM.forward, nn.SyncBatchNorm.forward = original, synchronised


def _averaged(norm: Any, x: Tensor) -> Tensor:
    others = [dim for dim in range(x.dim()) if dim != 1]
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        part = 1.0 / norm.num_batches_tracked.to(norm.running_mean.dtype)
        for running, now in (
            (norm.running_mean, x.mean(others)),
            (norm.running_var, x.var(others)),
        ):
            running.copy_(running + part * (now.to(running.dtype) - running))
    return functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
