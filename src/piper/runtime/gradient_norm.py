"""Norms of gradients, and clipping by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piper.runtime.torch_private import foreach_mul_, foreach_norm


def square(grads: Any) -> torch.Tensor:
    """The squared norm in float64. Gradients of low precision are summed in a higher one."""
    tensors = [real(tensor) for tensor in as_tuple(grads) if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    coarse = [t for t in tensors if added_in(t) is not None]
    fine = [t for t in tensors if added_in(t) is None]
    norms = [*(foreach_norm(fine) if fine else ())]
    norms += foreach_norm(coarse, 2, added_in(coarse[0])) if coarse else ()
    return torch.stack([norm.double() for norm in norms]).square().sum()


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def added_in(grad: torch.Tensor) -> torch.dtype | None:
    """The dtype to sum in, or None for the gradient's own.

    A CPU adds one number after the other. In float32, the sum of a million numbers is off by 3e-5,
    and a flat shard has many millions.
    """
    if grad.device.type == "cpu":
        return None if grad.dtype is torch.float64 else torch.float64
    return torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else None


def clip(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float | None) -> None:
    """Like torch.nn.utils.clip_grad_norm_, with the norm over all devices."""
    assert max_norm is not None
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype is dtype]
        foreach_mul_(alike, factor.to(finer(dtype)))


def finer(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a factor for tensors of `dtype`: bfloat16 would round it to 3 digits."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)
