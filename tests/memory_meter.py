"""Measure the memory of tensors: every storage, from the operation that makes it until freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(TorchDispatchMode):
    """Inside, `peak` is the most bytes that tensors made here, and `held`, were at once.

    Views of `others` (inputs of the step) do not count.

    Slow: it looks at every operation. On GPUs, ask the allocator instead.
    """

    def __init__(
        self, held: Iterable[torch.Tensor] = (), others: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.others = {tensor.untyped_storage()._cdata for tensor in others}
        self.peak = 0
        for tensor in held:
            self.see(tensor)

    def see(self, tensor: torch.Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # the local part of a DTensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages and key not in self.others:
            self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))

    @property
    def live(self) -> int:
        """Storages may shrink while they live, so they are asked each time."""
        found = [ref() for ref in list(self.storages.values())]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        self.peak = max(self.peak, self.live)
        return result
