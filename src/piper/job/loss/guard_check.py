"""Try a loss on outputs of which a row is not finite: it may guard all rows together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, isnan, nan
from typing import Any

import torch

from piper.capture.loss import LossForm
from piper.job.batch.batch import Batch
from piper.job.loss.loss_reduction import Reduction, bent
from piper.job.loss.mean_loss_check import ROUNDING, Trial, prepared, refuse_no_mean
from piper.job.loss.random_outputs import Output, interpretations

NOWHERE = "a line that Piper does not see"


def refuse_bent(
    loss_fn: Callable[..., Any] | None,
    output: Output,
    batch: Batch,
    samples: int,
    kind: Reduction,
    form: LossForm,
    trusted: bool,
) -> None:
    """Refuse a loss that is no mean of its halves, as `refuse_no_mean` does, also if it is none
    where a row of one of them is not finite.

    Others are not finite then, or leave this row out by itself. `trusted`: the user says that it is
    a mean or a sum, which it is for all finite rows.
    """
    refuse_no_mean(loss_fn, output, batch, samples, kind, form)
    if loss_fn is None or trusted:
        return
    own, output, labels = prepared(loss_fn, output, batch, form)
    with torch.random.fork_rng(devices=[]):
        every = interpretations(output, samples)
        if every and not any(all(_same(own, one, labels, samples, kind)) for one in every):
            raise bent(NOWHERE)


def _same(
    loss_fn: Callable[..., Any], output: Output, labels: Any, samples: int, kind: Reduction
) -> Iterator[bool]:
    """Whether halves give the whole, for each value that is not finite and can be tried."""
    for poison in (nan, inf):
        trial = Trial(output, labels, samples, 0, torch.float64, poison=poison)
        try:
            losses = trial.losses(loss_fn)
        except Exception:  # some losses refuse such values themselves
            continue
        whole, one, other = map(float, losses)
        yield _is_close(whole, (one + other) / (2 if kind == "mean" else 1), losses[0].dtype)


def _is_close(a: float, b: float, dtype: torch.dtype) -> bool:
    if isnan(a) or isnan(b) or inf in (abs(a), abs(b)):
        return not (_is_finite(a) or _is_finite(b))
    return abs(a - b) <= ROUNDING.get(dtype, ROUNDING[torch.float16]) * max(abs(a), abs(b))


def _is_finite(number: float) -> bool:
    return abs(number) < inf
