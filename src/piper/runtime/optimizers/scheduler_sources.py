"""Schedulers that look at more than the number of steps.

Every bucket of parameters has an optimizer and a scheduler, and gradients are gone when these step.
So what a scheduler sets must not depend on gradients, and where there are several buckets, nor on
the optimizer's state, nor on what other schedulers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)

from piper.errors import StrategyError
from piper.runtime.optimizers.kept_optimizers import own_tensors
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, MakeScheduler
from piper.runtime.optimizers.own_parameters import with_attributes
from piper.runtime.optimizers.small_parameters import (
    Kind,
    Parameters,
    fitting,
    made,
    one_of_each,
    set_gradients,
)
from piper.runtime.optimizers.user_optimizer import forward
from piper.runtime.optimizers.whole_options import Options, options_of, same

STEPS = 6
COUNTING = (  # torch's own, without functions of the user
    ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, ExponentialLR, LinearLR,
    MultiStepLR, OneCycleLR, PolynomialLR, StepLR,
)  # fmt: skip
Rates = list[list[Options]]  # after each step, of each group


def refuse_other_sources(
    make: MakeOptimizer,
    schedule: MakeScheduler | None,
    parameters: Mapping[str, torch.nn.Parameter],
    several: bool,
) -> None:
    """Try it on small parameters. If that fails, assume that it is fine."""
    if schedule is None:
        return
    make = with_attributes(make, parameters)
    trial = Trial(make, schedule, fitting(make, one_of_each(parameters)))
    try:
        if trial.only_counts():
            return
        alone = trial.rates([1.0])
        if not alike(alone, trial.rates([1.0], gone=True)):
            raise refused("on gradients, which are gone by then")
        if several and not alike(alone, trial.rates([100.0])):
            raise refused("on its optimizer's state")
        if several and not alike(alone, trial.rates([1.0, 100.0])):
            raise refused("on how often it is called for others")
    except StrategyError:
        raise
    except Exception:  # whatever a user's scheduler raises: the calls that count do as well
        return


@dataclass(frozen=True)
class Trial:
    make: MakeOptimizer
    schedule: MakeScheduler
    kinds: Sequence[Kind]

    def only_counts(self) -> bool:
        return type(self.made()[2]) in COUNTING

    def made(self) -> tuple[torch.optim.Optimizer, Parameters, LRScheduler]:
        optimizer, parameters = made(self.make, self.kinds)
        own_tensors(optimizer)
        return optimizer, parameters, self.schedule(optimizer)

    def rates(self, scales: Sequence[float], gone: bool = False) -> Rates:
        """What the first of some optimizers has, whose gradients are so large.

        `gone`: schedulers step when there are no gradients any more.
        """
        both, found = [self.made() for _ in scales], []
        for step in range(STEPS):
            for scale, (optimizer, parameters, _) in zip(scales, both, strict=True):
                set_gradients(parameters, step, scale)
                optimizer.step()
                if gone:
                    optimizer.zero_grad()
            for *_, scheduler in both:
                forward(scheduler, 1)
            found.append([options_of(group) for group in both[0][0].param_groups])
        return found


def alike(one: Rates, other: Rates) -> bool:
    pairs = zip(one, other, strict=True)
    return all(same(a, b) for groups in pairs for a, b in zip(*groups, strict=True))


def refused(source: str) -> StrategyError:
    return StrategyError.of(
        "lr_scheduler",
        f"what it sets depends {source}: it is made once for each bucket of parameters, and steps "
        "after all updates",
        "compute it from the number of steps alone: partial(LambdaLR, lr_lambda=lambda step: ...); "
        "or do it in the optimizer's step",
    )
