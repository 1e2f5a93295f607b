"""A tape of operators that stands for CUDA graphs, and a model for it, which is captured once."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture import capture
from piper.models.llama import Llama, LlamaConfig, cross_entropy

LLAMA = partial(LlamaConfig, vocab=32, dim=16, heads=2, tied=True)
ROWS = 2
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class OperatorTape:
    """Replays operators on the very tensors that were there when they were recorded."""

    def record(self, do: Any) -> Any:
        calls: list[Any] = []

        class Log(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                found = func(*args, **(kwargs or {}))
                calls.append((func, args, kwargs or {}, found))
                return found

        with Log():
            do()

        def replay() -> None:
            for func, args, kwargs, found in calls:
                again = pytree.tree_leaves(func(*args, **kwargs))
                for old, new in zip(pytree.tree_leaves(found), again, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@cache
def llama(stages: int) -> tuple[Any, ...]:
    torch.manual_seed(1)
    config = LLAMA(layers=stages)
    model, tokens = Llama(config, stages=stages).double(), torch.randint(32, (3, 16, 6))
    example = (tokens[0, :ROWS], tokens[0, :ROWS])
    return model, cross_entropy, tokens, capture(model, cross_entropy, example)
