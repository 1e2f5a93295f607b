"""Microbatches in which nothing counts: a mean over nothing is not a number."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from piper.capture.loss import LossForm, is_empty
from piper.errors import InputError
from piper.job.batch.batch import Batch


def is_known_empty(form: LossForm, microbatch: Batch) -> bool:
    """Whether its loss has no numerator, either: its gradients are then zero, not NaN."""
    count = form.of(microbatch.rows).count
    return count is not None and form.count is not None and is_empty(count, microbatch.tensors)


def refuse_empty(weights: Sequence[float], empty: Sequence[bool]) -> None:
    """`empty`: those in which no label counts, which are no error beside others."""
    for part, weight in enumerate(weights):
        if weight < 0:
            what = f"microbatch {part} has weight {weight:g}, which is negative"
            raise InputError.of("batch", what, "let loss_weight return 0 or more")
        if weight <= 0 and not empty[part]:
            raise InputError.of(
                "batch",
                f"microbatch {part} has weight {weight:g}: a mean over nothing is not a number",
                "divide by at least 1 in your loss, `mask.sum().clamp(min=1)`; or use a loss that "
                'is a sum, and Trainer(reduction="sum", loss_weight=...)',
            )


def refuse_no_divisor(divisors: Sequence[float]) -> None:
    """The root of how many count is 0 where none does, and the logarithm of one."""
    for part, one in enumerate(divisors):
        if one == 0 or not isfinite(one):
            raise InputError.of(
                "batch",
                f"the loss of microbatch {part} is divided by {one:g}, so that it is no number",
                "divide by the same function of at least 1, or 2 under a logarithm, such as "
                "`mask.sum().clamp(min=1).sqrt()`",
            )
