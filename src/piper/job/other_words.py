"""What other systems call their options, and what to write here: with the user's own values."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from piper.job.options_elsewhere import need_none
from piper.runtime.optimizers.user_optimizer import SCHEDULER

DEFAULT = {"lr": "3e-4"}  # of `Trainer(optimizer=...)`, beside what torch's AdamW has
OF_OPTIMIZER = {
    "lr": "lr",
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "betas": "betas",
    "eps": "eps",
}
NORMS = ("grad_clip", "clip_grad", "clip_grad_norm", "max_grad_norm", "gradient_clip_val")
COUNTS = ("gradient_accumulation_steps", "accumulate_grad_batches")


def elsewhere(name: str, given: Mapping[str, Any]) -> str | None:
    """What to write for an option of another system.

    >>> elsewhere("grad_clip", {"grad_clip": 0.5})
    'write max_norm=0.5, the norm that gradients are clipped to'
    >>> elsewhere("accumulate_grad_batches", {"accumulate_grad_batches": 4})
    'write microbatches=4 in the strategy, such as strategies.one_f_one_b(pp=1, microbatches=4)'
    >>> elsewhere("colour", {"colour": 1}) is None
    True
    """
    own = text_of(given[name])
    match name:
        case _ if name in OF_OPTIMIZER:
            return optimizer_fix(given)
        case _ if name in NORMS:
            return f"write max_norm={own}, the norm that gradients are clipped to"
        case _ if name in COUNTS:
            return microbatches_fix(count_of(given[name]))
        case "micro_batch_size":
            return microbatches_fix("...")
        case "bf16" | "fp16":
            return f'write precision="{name}"'
        case "mixed_precision":
            return f"write precision={own}" if own in ("'bf16'", "'fp16'") else PRECISION
    return need_none(name, given)


PRECISION = 'write precision="bf16" or "fp16"'


def microbatches_fix(own: str) -> str:
    such = "8" if own == "..." else own
    call = f"strategies.one_f_one_b(pp=1, microbatches={such})"
    return f"write microbatches={own} in the strategy, such as {call}"


def count_of(value: Any) -> str:
    """A whole number, also if a configuration has it as a float.

    >>> count_of(4.0), count_of(4), count_of("auto"), count_of(2.5)
    ('4', '4', '...', '...')
    """
    whole = isinstance(value, int | float) and value == value // 1
    return str(int(value)) if whole else "..."


def optimizer_fix(given: Mapping[str, Any]) -> str:
    """
    >>> print(optimizer_fix({"weight_decay": 0.1}).partition(";")[0])
    write optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
    """
    own = {OF_OPTIMIZER[name]: text_of(one) for name, one in given.items() if name in OF_OPTIMIZER}
    wanted = partial_text("torch.optim.AdamW", DEFAULT | own)
    decay = signature(torch.optim.AdamW).parameters["weight_decay"].default
    return (
        f"write optimizer={wanted}; the default is {partial_text('torch.optim.AdamW', DEFAULT)}, "
        f"and torch's own for the rest, such as weight_decay={decay}"
    )


def to_make_again(found: Any) -> str:
    """What makes an optimizer like this one. The default, if it is none.

    >>> to_make_again(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
    'write optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)'
    """
    if not isinstance(found, torch.optim.Optimizer):
        return f"write optimizer={partial_text('torch.optim.AdamW', DEFAULT)}"
    kind = type(found)
    known = signature(kind).parameters
    chosen = {
        name: text_of(one)
        for name, one in found.defaults.items()
        if name in known and (name == "lr" or one != known[name].default)
    }
    home = "torch.optim." if getattr(torch.optim, kind.__name__, None) is kind else ""
    return f"write optimizer={partial_text(home + kind.__name__, chosen)}"


def to_schedule_again(found: Any) -> str:
    """What makes a scheduler like this one. An example, if it is none of torch's.

    >>> to_schedule_again(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 30))
    'write lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=30)'
    """
    kind = type(found)
    if vars(torch.optim.lr_scheduler).get(kind.__name__) is not kind:
        return SCHEDULER
    chosen = {
        name: text_of(vars(found).get(name, ...))
        for name, one in signature(kind).parameters.items()
        if name not in ("optimizer", "last_epoch") and vars(found).get(name, ...) != one.default
    }
    call = f"torch.optim.lr_scheduler.{kind.__name__}"
    return f"write lr_scheduler={partial_text(call, chosen)}"


def partial_text(call: str, options: Mapping[str, str]) -> str:
    return f"partial({', '.join([call, *(f'{name}={one}' for name, one in options.items())])})"


def text_of(value: Any) -> str:
    """A value as one writes it, if it is short.

    >>> text_of(0.5), text_of((0.9, 0.95)), text_of(torch.zeros(3))
    ('0.5', '(0.9, 0.95)', '...')
    """
    return repr(value) if isinstance(value, int | float | str | tuple | None) else "..."
