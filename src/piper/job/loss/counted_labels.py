"""Whether a loss that is no mean over rows seems to be one over the labels other than -100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piper.job.loss.random_labels import IGNORED

COUNTED = "loss_weight=lambda *microbatch: (microbatch[-1] != -100).sum()"
NAMED = "loss_weight=lambda labels, **rest: (labels != -100).sum()"  # of a dict


def has_ids(labels: Any) -> bool:
    """Whether they are one tensor of integers, of which some may be ignored."""
    return isinstance(labels, torch.Tensor) and labels.dtype is torch.int64


def times_counted(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss times the number of labels that count: a sum over rows, if it is a mean over them.

    >>> summed = times_counted(lambda output, labels: output[labels != -100].mean())
    >>> summed(torch.tensor([2.0, 3.0, 9.0]), torch.tensor([0, 1, -100])).item()
    5.0
    """

    def summed(output: Any, labels: torch.Tensor) -> Any:
        counted = (labels != IGNORED).sum()
        return loss_fn(output, labels) * counted if counted else torch.zeros(())

    return summed


def weigh_by_counted(named: bool) -> str:
    """What to write first, if it is one. `named`: of batches that are dicts, or keywords."""
    weight = NAMED if named else COUNTED
    return f"if it is a mean over the labels other than -100, give the Trainer {weight}; otherwise "
