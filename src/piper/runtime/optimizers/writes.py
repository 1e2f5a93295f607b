"""Writes that no version counts: `p.data.mul_(0.5)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piper.runtime.torch_private import TorchDispatchMode, written


class Writes(TorchDispatchMode):
    """Sees operators that write to the memory of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.memory = {one.untyped_storage().data_ptr() for one in tensors}
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for one in written(func, args, kwargs or {}):
            self.found |= one.untyped_storage().data_ptr() in self.memory
        return func(*args, **(kwargs or {}))
