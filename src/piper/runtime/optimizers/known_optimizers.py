"""Optimizers that are known to treat every parameter by itself: torch's, and those that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LRScheduler

from piper.runtime.torch_private import has_own_step

Named = list[tuple[str, torch.nn.Parameter]]
MakeOptimizer = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD",
)  # fmt: skip


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's, as it is, or says that it treats every element by itself."""
    return is_unchanged(optimizer) or getattr(optimizer, "elementwise", False)


def is_unchanged(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's, as it is."""
    return is_torchs(type(optimizer)) and not has_own_step(optimizer)


def is_torchs(kind: type) -> bool:
    """
    >>> class Adam(torch.optim.Adam): ...
    >>> is_torchs(torch.optim.Adam), is_torchs(Adam)
    (True, False)
    """
    return vars(torch.optim).get(kind.__name__) is kind


def is_elementwise(kind: type) -> bool:
    """Whether it is one of torch's that treat every element by itself."""
    return is_torchs(kind) and kind.__name__ in ELEMENTWISE
