"""What a microbatch weighs, if the user says it: `loss_weight=`."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor

from piper.capture.trace.arguments.call_arguments import as_given
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.names import amount

Weight = Callable[..., Any]  # a function of the arguments of a microbatch
WEIGHTS = (
    "loss_weight=lambda *microbatch: its weight; for batches that are dicts, "
    "loss_weight=lambda labels, **rest: (labels[:, 1:] != -100).sum()"
)


def weight_of(weight: Weight, microbatch: Batch) -> float:
    """The user's weight of a microbatch, which it gets as the step got the batch."""
    given, named = as_given(microbatch.arguments)
    try:
        signature(weight).bind(*given, **named)
    except TypeError as error:
        kind = f"keywords ({', '.join(named)})" if named else amount(len(given), "value")
        what = f"it is called with {kind}, as step is, and cannot take that: {error}"
        raise InputError.of("loss_weight", what, f"write {WEIGHTS}") from None
    found = weight(*given, **named)
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        said = f"a tensor {[*found.shape]}" if isinstance(found, Tensor) else repr(found)
        what = f"it returns {said} for a microbatch, which is no finite number"
        raise InputError.of("loss_weight", what, f"write {WEIGHTS}")
    return number
