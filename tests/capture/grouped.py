"""An operator of the user's own: rows sorted by expert, times the matrix of their expert."""

import torch
from torch import Tensor

# pytest may load this file under several names; an operator that is registered twice under one
# name leaves its first self dangling.
HERE = __name__.replace(".", "_")


@torch.library.custom_op(f"{HERE}::grouped", mutates_args=())
def grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of `x`, sorted by expert, each times the matrix of its expert."""
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


@grouped.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op(f"{HERE}::grouped_weight", mutates_args=())
def grouped_weight(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    pairs = zip(x.split(sizes), grad.split(sizes), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


@grouped_weight.register_fake
def _(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], grad.shape[1])


def keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, grad: Tensor):
    x, weight, counts = ctx.saved_tensors
    return grouped(grad, weight.transpose(1, 2), counts), grouped_weight(x, grad, counts), None


grouped.register_autograd(backward, setup_context=keep)
