"""A loss that is zero up to rounding: its terms cancel, and what they are says how far they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from piper.capture.trace.trials.trial_run import Result

TIMES = 64  # what rounding of many terms adds up to, in units in the last place
FINE = (torch.float64, torch.float32)  # in coarser types, a true difference may be as small


def rounding_of(calls: Sequence[Result], loss: Tensor, coarsest: torch.dtype) -> float:
    """How far a loss may be from what it is without rounding, judged by what it sums up."""
    if coarsest not in FINE:
        return 0.0
    sizes = (float(one.double().abs().max()) for one in summed(calls, loss) if one.numel())
    return TIMES * float(torch.finfo(coarsest).eps) * max(sizes, default=0.0)


def summed(calls: Sequence[Result], loss: Tensor) -> Iterator[Tensor]:
    """What a loss is computed from: back through single numbers, to the tensors before them.

    A number from one other number alone is no sum: log(exp(x)) is rounded as x is, not as exp(x).
    """
    value = loss.detach().double().reshape(())
    made = (k for k, one in enumerate(calls) if is_number(one.tensor, value))
    waiting, seen = [(k, True) for k in list(made)[-1:]], set[int]()
    while waiting:
        k, is_term = waiting.pop()
        if k not in seen:
            seen.add(k)
            one = calls[k]
            if is_term or one.tensor.numel() != 1:
                yield one.tensor.detach()
            terms = one.inputs if one.tensor.numel() == 1 else ()
            waiting += [(term, len(terms) > 1) for term in terms]


def is_number(tensor: Tensor, value: Tensor) -> bool:
    return tensor.numel() == 1 and bool(tensor.detach().double().reshape(()) == value)
