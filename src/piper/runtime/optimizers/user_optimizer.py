"""The user's optimizer: made for each bucket, and checked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from piper.errors import StrategyError
from piper.runtime.optimizers.joint_optimizers import refuse_joint
from piper.runtime.optimizers.kept_optimizers import own_tensors
from piper.runtime.optimizers.known_optimizers import (
    MakeOptimizer,
    MakeScheduler,
    Named,
)
from piper.runtime.optimizers.seen_optimizers import (
    Who,
    options_of,
    refuse_changed,
    refuse_partly_changed,
    seen,
    weights_of,
)
from piper.runtime.optimizers.writes import Writes
from piper.runtime.torch_private import has_gradient_hooks, has_step_hooks, note_step

SCHEDULER = "write lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
OF_STEPS = (
    "for a function of the step, write "
    "lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=...), which gives a factor "
    "of the learning rate"
)
SCHEDULED = (
    "lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "max_momentum", "base_momentum",
    "weight_decay",
)  # fmt: skip
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
STEP = Who("lr_scheduler", "its step", StrategyError)


def make_checked(make: MakeOptimizer, named: Named) -> torch.optim.Optimizer:
    """The user's optimizer of these parameters. An error if it would train others."""
    try:
        optimizer = make(list(named))
    except (TypeError, AttributeError) as error:
        raise refused(
            f"it cannot be called with parameters: {error}",
            "write optimizer=partial(torch.optim.AdamW, lr=3e-4); a function of your own gets "
            "(name, parameter) pairs",
        ) from error
    except ValueError as error:
        known = chose_none(error, named) or only_matrices(error)
        if known is None:
            raise
        raise known from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refused(
            f"it made {type(optimizer).__name__}, which is not a torch.optim.Optimizer",
            "write optimizer=partial(torch.optim.AdamW, lr=3e-4)",
        )
    refuse_unusual(optimizer)
    refuse_other_parameters(optimizer, named)
    refuse_hooks(optimizer, named)
    refuse_frozen(named)
    refuse_joint(make, optimizer, named)
    own_tensors(optimizer)
    return optimizer


def chose_none(error: Exception, named: Named) -> StrategyError | None:
    """If this is why torch's optimizers refuse a call: what to write instead."""
    if "empty parameter list" not in str(error):
        return None
    return refused(
        f"it got {names_text(named)} and chose none of them: it is called once for each bucket of "
        "parameters",
        "freeze what must not be trained with requires_grad_(False)",
    )


def only_matrices(error: Exception) -> StrategyError | None:
    """torch's Muon takes no biases or norms."""
    if "2D parameters" not in str(error):
        return None
    return refused(
        f"it cannot take all parameters: {error}",
        "a bucket of parameters has one optimizer: write a class of your own that updates matrices "
        "as this one does, and the others as AdamW does, and keeps its state in self.state[p]",
    )


def with_arguments(make: Any) -> str:
    """How to give a function of the user's what it needs beside an optimizer. Empty: it is none.

    >>> def warmup(optimizer, num_warmup_steps, last_epoch=-1): ...
    >>> with_arguments(warmup)
    'write lr_scheduler=partial(warmup, num_warmup_steps=...)'
    """
    try:
        _, *others = signature(make).parameters.values()
    except (TypeError, ValueError):
        return ""
    needed = [one.name for one in others if one.default is one.empty and one.kind not in VARIADIC]
    name = getattr(make, "__name__", "")
    if not needed or not name.isidentifier():
        return ""
    return f"write lr_scheduler=partial({name}, {', '.join(f'{one}=...' for one in needed)})"


def make_scheduler(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The user's scheduler of one of the optimizers. It steps whenever its optimizer does."""
    try:
        scheduler = make(optimizer)
    except TypeError as error:
        raise StrategyError.of(
            "lr_scheduler",
            f"it cannot be called with an optimizer: {error}",
            with_arguments(make) or f"{SCHEDULER}; {OF_STEPS}",
        ) from error
    if isinstance(scheduler, int | float):
        what = f"it made the number {scheduler}, and no scheduler of an optimizer"
        raise StrategyError.of("lr_scheduler", what, OF_STEPS)
    if not isinstance(scheduler, LRScheduler):
        what = f"it made {type(scheduler).__name__}, which is no scheduler of torch"
        raise StrategyError.of("lr_scheduler", what, SCHEDULER)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise StrategyError.of(
            "lr_scheduler",
            f"it made {type(scheduler).__name__}, which needs more than the number of steps",
            f"{SCHEDULER}, or another scheduler that needs only the number of steps",
        )
    if scheduler.optimizer is not optimizer:
        raise StrategyError.of(
            "lr_scheduler",
            "it made a scheduler for an optimizer that it was not given",
            "make a new one at each call: every bucket of parameters has its own optimizer",
        )
    return scheduler


def settings(optimizer: torch.optim.Optimizer, scheduled: bool) -> list[dict[str, Any]]:
    """Numbers in an optimizer's groups, without those that a scheduler sets."""
    return [
        {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if not (scheduled and key in SCHEDULED) and is_number(value)
        }
        for group in optimizer.param_groups
    ]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not value.dim())


def forward(scheduler: LRScheduler, steps: int) -> None:
    """Bring a scheduler to where it was after so many steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for _ in range(steps):
            scheduler.step()


def step_schedulers(schedulers: Sequence[LRScheduler]) -> None:
    """Those of all buckets. What one sets late, where no trial has seen it, must fit the others."""
    before = [tuple(options_of(one.optimizer)) for one in schedulers]
    for one in schedulers:
        step_scheduler(one)
    after = [tuple(options_of(one.optimizer)) for one in schedulers]
    refuse_partly_changed(before, after, STEP)


def step_scheduler(scheduler: LRScheduler) -> None:
    """One of the user's own may change weights late, where no trial has seen it."""
    note_step(scheduler.optimizer)  # torch warns of one that was not called
    if type(scheduler).__module__.startswith("torch."):
        scheduler.step()
        return
    before = seen(scheduler.optimizer)
    with Writes(weights_of(scheduler.optimizer)) as writes:
        scheduler.step()
    refuse_changed(before, seen(scheduler.optimizer), STEP)
    if writes.found:
        raise STEP.error(
            "has written to a parameter: a scheduler sets options of its optimizer's groups",
            "change weights in the optimizer's step",
        )


def refuse_other_parameters(optimizer: torch.optim.Optimizer, named: Named) -> None:
    given = {id(parameter) for _, parameter in named}
    used = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if used - given:
        raise refused(
            f"it was given {names_text(named)}, but trains other parameters",
            "make a new optimizer at each call, of the parameters it gets: "
            "optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)",
        )


def refuse_unusual(optimizer: torch.optim.Optimizer) -> None:
    """These would fail at the first update."""
    why = {torch.optim.LBFGS: "calls the model several times in one step",
           torch.optim.SparseAdam: "needs sparse gradients, and Piper's are dense"}  # fmt: skip
    for kind, reason in why.items():
        if isinstance(optimizer, kind):
            fix = "use an optimizer that needs one dense gradient for each step, such as AdamW"
            raise refused(f"{kind.__name__} {reason}", fix)


def refuse_hooks(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Hooks would see only some of the gradients, or none."""
    if has_step_hooks(optimizer):
        raise refused(
            "it has step hooks, which would see only some of the parameters",
            "remove them; to clip by the norm of all gradients, give Trainer(max_norm=...)",
        )
    if "zero_grad" in vars(optimizer):
        raise refused("its zero_grad was replaced, which Piper never calls", "do it in its step")
    if any(has_gradient_hooks(parameter) for _, parameter in named):
        raise refused(
            "it puts hooks on gradients, which Piper never calls",
            "change gradients in the optimizer's step instead",
        )


def refuse_frozen(named: Named) -> None:
    """Gradients are computed for what the model trains."""
    if frozen := [(name, one) for name, one in named if not one.requires_grad]:
        raise refused(
            f"it freezes {names_text(frozen)} (requires_grad), after it is known what is trained",
            "freeze parameters of the model before you make the Trainer: "
            "parameter.requires_grad_(False)",
        )


def names_text(named: Named) -> str:
    names = ", ".join(name for name, _ in named[:3])
    return f"{names} and {len(named) - 3} more" if len(named) > 3 else names


def refused(what: str, fix: str) -> StrategyError:
    return StrategyError.of("optimizer", what, fix)
