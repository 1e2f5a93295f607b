"""Parameters that are in host memory, and come to the device to be used or updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piper.runtime.host_memory import Copying, HostMemory, Pages

Tensors = tuple[torch.Tensor, ...]


class Holder(Protocol):
    """A bucket with its parameters."""

    tensors: Tensors
    parameters: tuple[torch.nn.Parameter, ...]
    copies: list[tuple[torch.Tensor, torch.nn.Parameter]]  # and their masters
    on_host: bool
    storing: Copying | None
    home: Pages

    def views(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """The memory of the host in which a bucket is."""

    bucket: Holder
    memory: HostMemory

    def store(self, value: Any, stream: str, pages: Pages | None = None) -> Copying:
        """Start to copy new parameters to where the old ones are."""
        self.bucket.storing = self.memory.store(value, stream, self.bucket.home)
        return self.bucket.storing

    def fetch(self, value: Any, stream: str) -> Copying:
        return self.memory.fetch(value, stream)


def to_host(bucket: Holder, memory: HostMemory) -> None:
    """From now on its memory is that of the host."""
    copy = BucketMemory(bucket, memory).store(bucket.tensors, "")
    bucket.tensors, bucket.on_host = copy.wait(), True
    copy.finish()
    use(bucket, bucket.tensors)


@contextmanager
def updating(
    bucket: Holder, grads: Sequence[torch.Tensor], fetched: Tensors | None
) -> Iterator[None]:
    """Inside, parameters have gradients, and are what was fetched, if anything was."""
    if fetched is not None:
        use(bucket, fetched)
    for parameter, grad in zip(bucket.parameters, grads, strict=True):
        parameter.grad = grad
    yield
    for parameter in bucket.parameters:
        parameter.grad = None
    if fetched is not None:
        use(bucket, bucket.tensors)


def use(bucket: Holder, tensors: Tensors) -> None:
    """Let the optimizer work on these. Masters have memory of their own."""
    bucket.copies = []
    for view, parameter in zip(bucket.views(tensors), bucket.parameters, strict=True):
        if view.dtype == parameter.dtype:
            parameter.data = view
        else:
            bucket.copies.append((view, parameter))
