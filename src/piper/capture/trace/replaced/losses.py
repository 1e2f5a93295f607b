"""Losses of torch that read values: the CTC loss reads lengths, that of Gaussians variances."""

from math import log, pi
from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.ctc import CTC


def ctc(
    func: Any, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
    blank: int = 0, reduction: str | int = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    inputs, lengths = (lengths_of(one, log_probs.device) for one in (input_lengths, target_lengths))
    refuse_other_rows(log_probs, inputs, lengths, *([targets] if targets.dim() == 2 else []))
    losses = CTC(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses.isinf(), torch.zeros_like(losses), losses)
    if reduction in ("mean", 1):
        return (losses / lengths.clamp(min=1).to(losses.dtype)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses[0] if single else losses


def refuse_other_rows(log_probs: Tensor, *others: Tensor) -> None:
    """As torch does. A run with other sizes shows by this which tensors have the rows."""
    sizes = [log_probs.shape[1], *(one.shape[0] for one in others)]
    known = {size for size in sizes if isinstance(size, int)}
    if len(known) > 1:
        raise RuntimeError(f"ctc_loss has log_probs, targets and lengths of {sizes} rows")


def lengths_of(given: Any, device: torch.device) -> Tensor:
    """Equal ones as one number: a proof sees that they are the same for each row."""
    if isinstance(given, list | tuple) and len(set(given)) == 1:
        return torch.full((len(given),), given[0], device=device)
    return torch.as_tensor(given, device=device).reshape(-1)


def gaussian(
    func: Any, input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """torch asks whether a variance is negative, which is an error. Here, the loss is NaN then."""
    if not isinstance(var, Tensor):
        return func(input, target, var, full=full, eps=eps, reduction=reduction)
    var = at_least(one_for_each(var, input), eps)
    losses = 0.5 * (var.log() + (input - target).square() / var)
    losses = losses + 0.5 * log(2 * pi) if full else losses
    reductions = {"mean": losses.mean, "sum": losses.sum, "none": lambda: losses}
    if reduction not in reductions:
        raise ValueError(f"{reduction} is not valid")
    return reductions[reduction]()


def one_for_each(var: Tensor, input: Tensor) -> Tensor:
    """Variances of the last dimension may be one, or left out; those of one other may be one."""
    if var.shape == input.shape[:-1]:
        return var.unsqueeze(-1)
    pairs = zip(var.shape, input.shape, strict=False)
    others = [here for here, there in pairs if here != there]
    if var.dim() != input.dim() or sum(others) > 1:
        raise ValueError("var is of incorrect size")
    return var


def at_least(var: Tensor, eps: float) -> Tensor:
    """Its derivative is that of `var`, as torch has it: it raises values where no gradient sees."""
    least = torch.full_like(var, eps).masked_fill(var < 0, float("nan"))
    raised = least + (var - var.detach())
    return torch.where(var < eps, raised, var)
