"""Weights change in an optimizer's step, and nowhere else.

Its function is called several times: to compare options, and once for each bucket. Schedulers step
for each bucket, too. What they change besides would change several times, or for some buckets only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piper.errors import StrategyError
from piper.runtime.optimizers.kept_optimizers import own_tensors
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, MakeScheduler, Named
from piper.runtime.optimizers.own_parameters import with_attributes
from piper.runtime.optimizers.user_optimizer import forward
from piper.runtime.optimizers.whole_options import STEPS, is_plain

SMALL = 2**12  # elements that are copied for a trial


def refuse_changed_weights(
    make: MakeOptimizer,
    schedule: MakeScheduler | None,
    parameters: Mapping[str, torch.nn.Parameter],
) -> None:
    """Try them on copies. If they cannot be tried, assume that they are fine."""
    if is_plain(make) and schedule is None:
        return
    named = [(name, copied(one)) for name, one in parameters.items()]
    before = [parameter.detach().clone() for _, parameter in named]
    optimizer = made(with_attributes(make, parameters), named)
    if name := changed(named, before):
        raise StrategyError.of(
            "optimizer",
            f"it changes {name} where it is made, and it is made several times",
            "change weights before, on the model (with torch.no_grad(): ...), or in the "
            "optimizer's step",
        )
    if optimizer is not None and schedule is not None:
        step(schedule, optimizer, named)
        if name := changed(named, before):
            raise StrategyError.of(
                "lr_scheduler",
                f"it changes {name}: a scheduler sets options of its optimizer's groups",
                "change weights in the optimizer's step",
            )


def copied(own: torch.nn.Parameter) -> torch.nn.Parameter:
    """With the same values, or a small one with as many dimensions."""
    if own.is_meta or own.numel() > SMALL:
        return torch.nn.Parameter(torch.ones([2] * own.dim(), dtype=own.dtype))
    return torch.nn.Parameter(own.detach().cpu().clone(), own.requires_grad)


def made(make: MakeOptimizer, named: Named) -> torch.optim.Optimizer | None:
    try:
        with torch.enable_grad():
            optimizer = make(list(named))
        own_tensors(optimizer)
        return optimizer
    except Exception:  # whatever it is, it happens in the calls that count as well
        return None


def step(schedule: MakeScheduler, optimizer: torch.optim.Optimizer, named: Named) -> None:
    try:
        scheduler = schedule(optimizer)
        for _, parameter in named:
            optimizer.state[parameter].update()  # there is one after a step, and it may be counted
        forward(scheduler, STEPS)
    except Exception:  # likewise
        return


def changed(named: Named, before: list[torch.Tensor]) -> str:
    """The name of the first that is not as it was; none: all are."""
    for (name, parameter), value in zip(named, before, strict=True):
        if parameter.shape != value.shape or not torch.allclose(
            parameter.detach(), value, rtol=0, atol=0, equal_nan=True
        ):
            return name
    return ""
