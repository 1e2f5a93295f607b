"""Memory around the recording of CUDA graphs: as little as possible stays reserved for nothing.

Steps without graphs leave optimizer state between activations, in segments that torch can then not
give back. So state moves to a memory pool of its own first. The pool of the graphs grows page by
page, instead of segment by segment.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from piper.garbage import collector_off
from piper.runtime.torch_private import is_shared, pytree, set_allocator

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def separate_state(optimizers: Iterable[Any], device: torch.device) -> object | None:
    """Move optimizer state to a pool of its own, which lives as long as the result."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.MemPool()
    move_state(optimizers, lambda: torch.cuda.use_mem_pool(pool))
    return pool


def move_state(optimizers: Iterable[Any], there: Callable[[], AbstractContextManager[Any]]) -> None:
    """Each tensor stays the same object. If anything else shares its memory, it is not moved."""
    for optimizer in optimizers:
        for tensor in pytree.tree_leaves(list(getattr(optimizer, "state", {}).values())):
            if type(tensor) is torch.Tensor and tensor.numel() > 1 and not is_shared(tensor):
                with there(), torch.no_grad():
                    tensor.set_(tensor.clone())


@contextmanager
def growing_segments() -> Iterator[None]:
    """New memory comes in segments that grow, unless the user has settings for torch's allocator:
    these would be lost."""
    if not torch.cuda.is_available() or any(os.environ.get(name) for name in SETTINGS):
        yield
        return
    set_allocator("expandable_segments:True")
    try:
        yield
    finally:
        set_allocator("expandable_segments:False")


@contextmanager
def nothing_freed() -> Iterator[None]:
    """Collecting GPU objects during a recording would invalidate it: collect them before."""
    gc.collect()
    with collector_off():
        yield
