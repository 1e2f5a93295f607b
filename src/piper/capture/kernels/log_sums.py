"""The logarithm of a sum of exponentials, of a slice that may have no word that is allowed.

torch's derivative of `logsumexp` is NaN if all that it sums is -inf. Of a whole row, so is that of
a softmax. But a slice of a row may be such: padding of a vocabulary, masked by -inf.
"""

from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.derivatives import differentiated


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        found = torch.logsumexp(x, dim, keepdim=True)
        ctx.save_for_backward(x, found)
        ctx.dim = dim
        return found.squeeze(dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, found = ctx.saved_tensors
        finite = found.masked_fill(found == -torch.inf, 0.0)
        return grad.unsqueeze(ctx.dim) * (x - finite).exp(), None


LOG_SUM = differentiated("log_sum(Tensor x, int dim) -> Tensor", _LogSum)
