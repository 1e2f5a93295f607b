"""RMS norm as one operator on a CPU, as it is on a GPU.

torch takes it apart on a CPU. A graph of parts keeps more for the backward and moves more bytes
than a GPU's kernel, so forecasts for a GPU would be too high.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.derivatives import computed, differentiated

aten = torch.ops.aten
_GIVEN = "Tensor x, int[] shape, Tensor? weight, float? eps"


def _forward(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The result, and one over the root of the mean square, which the backward reads."""
    return aten._fused_rms_norm.default(x, shape, weight, eps)


def _backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], scale: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of `x`, and of the weight if there is one: bit for bit as autograd has them."""
    outer, inner = [*range(x.dim())][: -len(shape)], [*range(x.dim())][-len(shape) :]
    grad, fine = grad.to(scale.dtype), x.to(scale.dtype)
    scaled = grad if weight is None else grad * weight
    change = (scaled * fine).sum(inner, keepdim=True) * -0.5 * scale.pow(3) / prod(shape)
    found = (scaled * scale + change * (fine * 2.0)).to(x.dtype)
    if weight is None:
        return found, x.new_empty(0)
    of_weight = grad * (fine * scale)
    return found, (of_weight.sum(outer) if outer else of_weight).to(weight.dtype)


FORWARD = computed(f"rms_norm_forward({_GIVEN}) -> (Tensor, Tensor)", _forward, _forward)
_BACKWARD = computed(
    "rms_norm_backward(Tensor grad, Tensor x, int[] shape, Tensor scale, Tensor? weight) "
    "-> (Tensor, Tensor)",
    _backward,
    _backward,
)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        found, scale = FORWARD(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, scale, weight)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        found, of_weight = _BACKWARD(grad, x, ctx.shape, scale, weight)
        return found, None, None if weight is None else of_weight, None


RMS_NORM = differentiated(f"rms_norm({_GIVEN}) -> Tensor", _RmsNorm)


def has_kernel(x: Tensor, weight: Tensor | None) -> bool:
    """Whether a GPU has one kernel for it. torch takes other norms apart everywhere."""
    plain = x.is_floating_point() and x.is_contiguous()
    return plain and (weight is None or weight.dtype == x.dtype)
