"""Optimizers of a plain loop that is left around a Trainer: they step, and train nothing."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from piper.job.loop.callers import callers_level

MESSAGE = (
    "this optimizer steps on a model that a Trainer trains, and the model has no gradients: the "
    "Trainer has its own copy, its own optimizer and its own rate. Leave out the optimizer's step, "
    "its scheduler and clip_grad_norm_, and write Trainer(optimizer=functools.partial("
    "torch.optim.AdamW, lr=...), lr_scheduler=..., max_norm=...)"
)


class IdleOptimizers:
    """Warns once, while the Trainer is open."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = weakref.ref(model)
        self.handle = register_optimizer_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        given = [one for group in optimizer.param_groups for one in group["params"]]
        if any(one.grad is not None for one in given):
            return
        model = self.model()
        known = {id(one) for one in model.parameters()} if model is not None else set()
        if any(id(one) in known for one in given):
            self.close()
            warnings.warn(MESSAGE, stacklevel=callers_level())

    def close(self) -> None:
        self.handle.remove()
