"""A linear layer whose matrix products read float8: the result, and the gradient of its input.

Every row has a scale of its own: a token of the input or of the gradient, an output of the weight.
So a token gets the same result in every microbatch and on every replica. The gradient of the weight
adds over tokens. It is computed in the type of the input.
"""

from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.derivatives import differentiated
from piper.capture.torch_private import scaled_mm

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2  # finer, and of a larger range
MULTIPLE = 16  # a GPU's kernels want sizes of weights that it divides
TINY = 1e-30  # the largest element of a row of zeros counts as this


def rounded(rows: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in float8, and a scale for each in float32. The largest element uses all the range.

    Divided by a tensor: instead of dividing by a number, a GPU multiplies by its inverse. The last
    bit of a scale decides which way a tie is rounded.
    """
    largest = rows.abs().amax(-1, keepdim=True).float().clamp(min=TINY)
    scale = largest / torch.full_like(largest, torch.finfo(kind).max)
    return (rows.float() / scale).to(kind).contiguous(), scale


def product(rows: Tensor, kind: torch.dtype, columns: Tensor, fast: bool) -> Tensor:
    """`rows @ columns.T` in the type of the rows. `fast`: with sums of fewer digits on a GPU."""
    factors = (*rounded(rows, kind), *rounded(columns, VALUES))
    found = on_gpu(*factors, fast) if rows.device.type == "cuda" else elsewhere(*factors)
    return found.to(rows.dtype)


def on_gpu(left: Tensor, left_scale: Tensor, right: Tensor, scale: Tensor, fast: bool) -> Tensor:
    return scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=scale.t(), out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )  # fmt: skip


def elsewhere(left: Tensor, left_scale: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """The same from float32, because CPUs have no such kernel in some versions of torch."""
    return left.float() @ right.float().t() * left_scale * scale.t()


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        found = product(x.reshape(-1, x.shape[-1]), VALUES, weight, fast=True)
        return found.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = product(rows, GRADIENTS, weight.t(), fast=False).reshape(x.shape)
        return of_x, rows.t() @ x.reshape(-1, x.shape[-1])


SCALED_LINEAR = differentiated("scaled_linear(Tensor x, Tensor weight) -> Tensor", _ScaledLinear)
