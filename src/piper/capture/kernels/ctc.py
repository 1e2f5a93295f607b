"""The CTC loss of each row. torch's own operator takes its lengths as Python numbers."""

from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.derivatives import computed, differentiated

aten = torch.ops.aten
_GIVEN = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity"
)


def _both(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool
) -> tuple[Tensor, Tensor]:
    refuse_no_class(targets, lengths, log_probs.shape[-1])
    return aten._ctc_loss(log_probs, targets, inputs.tolist(), lengths.tolist(), blank, zero)


def refuse_no_class(targets: Tensor, lengths: Tensor, classes: int) -> None:
    """torch's kernels would read memory that is none of theirs. What pads a row may be anything."""
    wrong = (targets < 0) | (targets >= classes)
    if targets.dim() == 2:
        wrong &= torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
    if bool(wrong.any()):
        found = int(targets[wrong][0])
        raise IndexError(f"ctc_loss: target {found} is out of bounds for {classes} classes")


def _losses(log_probs: Tensor, *given: Any) -> Tensor:
    return _both(log_probs, *given)[0]


def _losses_fake(log_probs: Tensor, *given: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _gradient(
    grad: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int,
    zero: bool,
) -> Tensor:  # fmt: skip
    """The forward runs again: the size of what it would keep depends on the lengths."""
    losses, alpha = _both(log_probs, targets, inputs, lengths, blank, zero)
    return aten._ctc_loss_backward(
        grad.contiguous(), log_probs, targets, inputs.tolist(), lengths.tolist(), losses, alpha,
        blank, zero,
    )  # fmt: skip


def _gradient_fake(grad: Tensor, log_probs: Tensor, *given: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


_LOSSES = computed(f"ctc_losses({_GIVEN}) -> Tensor", _losses, _losses_fake)
_GRADIENT = computed(f"ctc_gradient(Tensor grad, {_GIVEN}) -> Tensor", _gradient, _gradient_fake)


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, *given: Any) -> Tensor:
        *tensors, ctx.blank, ctx.zero = given
        ctx.save_for_backward(log_probs, *tensors)
        return _LOSSES(log_probs, *given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _GRADIENT(grad, *ctx.saved_tensors, ctx.blank, ctx.zero)
        return found, None, None, None, None, None


CTC = differentiated(f"ctc({_GIVEN}) -> Tensor", _Ctc)
