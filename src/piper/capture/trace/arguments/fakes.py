"""Tensors without values, for a trace."""

import torch
from torch import Tensor

from piper.capture.fx_nodes import order_of
from piper.ir.values import TensorSpec


def fake(tensor: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """In its layout, unless that has gaps.

    Kernels get it contiguous: regions restore the layout where that matters.
    """
    like = tensor if order_of(tensor) else torch.empty(tensor.shape, device="meta")
    sizes, kind = (tensor.shape, like.stride()), dtype or tensor.dtype
    fake = torch.empty_strided(*sizes, dtype=kind, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def fake_input(spec: TensorSpec, device: str) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
